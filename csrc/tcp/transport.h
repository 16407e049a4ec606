// The messages between hosts over TCP, in this library's own protocol: an implementation of Transport (see
// ../net/transport.h), which RemotePeers calls.
//
// There are two lanes. A lane is the connections to the other ranks for one kind of messages (see lane.h):
//
//     data      the messages of collectives and users; the threads that wait for these messages read and write
//     control   notices and diagnosis (see ../net/tags.h); the transport's own thread reads and writes
//
// The transport's thread also accepts connections and checks their greetings. It moves the messages of the data lane
// while no other thread waits for one (see background_mover.h), so a rank that computes still receives and sends.
//
// gloo has a thread that reads all sockets and wakes the thread that waits, and it sends a message only after the
// receiver has announced its receive. Here the waiting thread reads the sockets itself, and a message is sent at once.
// So a message wakes one thread, where it wakes three in gloo.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <string>
#include <vector>

#include "../net/tags.h"
#include "../net/transport.h"
#include "background_mover.h"
#include "greeting.h"
#include "lane.h"

namespace dist_prims {

// What a rank needs to connect to the others. Python makes it (see dist_prims/backend/transport_selection.py).
struct TcpEndpoint {
    Socket listening;                      // non-blocking; accepted connections inherit its keepalive
    std::vector<std::string> addresses{};  // by rank, as connect_to() takes them
    std::string key{};                     // of the group: see greeting.h
    bool polls = false;                    // whether the ranks have cores enough to poll: see Polling
};

class TcpTransport : public Transport {
public:
    static constexpr int kLargestTag = 0x7fffffff;

    using OnClose = std::function<void(const std::string& reason)>;

    // `on_close`: called by the thread in whose wait the time limit has passed, after all connections were closed.
    // `on_gone`: called by any thread when a connection of the control lane has ended: at most once for the connection
    // to a rank, and once for the connection from it. It must not call the transport.
    TcpTransport(TcpEndpoint endpoint, int rank, OnClose on_close = nullptr, TcpLane::OnGone on_gone = nullptr);
    ~TcpTransport() override;
    TcpTransport(const TcpTransport&) = delete;

    int largest_tag() const override { return kLargestTag; }
    Handle send(int to, int tag, const std::byte* data, std::size_t bytes, Owner owner) override;
    Handle receive(int from, int tag, std::byte* data, std::size_t bytes, Owner owner) override;
    Handle receive_from_any(int tag, std::byte* data, std::size_t bytes, Owner owner, const ClaimPtr& claim) override;
    void progress() override { data_.progress(); }
    void move_in_background() override;
    FailedPeer failed_peer() override;
    std::vector<int> unanswering() override;
    std::map<int, Delivered> delivered() override { return data_.delivered(); }
    std::string refusal(bool now) override;
    void leave() override;

    // Opens a connection to a rank on the control lane, so that the end of the rank is noticed.
    void watch(int peer) { control_.open(peer); }
    // Fails all messages, also future ones, and closes all connections. Any thread may call it.
    void close(const std::string& reason);

private:
    enum LaneKind { kData, kControl, kLanes };
    // A connection that has been accepted and whose greeting is not complete.
    struct Newcomer {
        Socket socket;
        TcpLane::Clock::time_point accepted_at;
        std::size_t greeting_bytes = 0;  // that have been read
        Greeting greeting{};
    };

    TcpLane& lane_of(int tag) { return tags_.is_control(tag) ? control_ : data_; }
    Handle post(TcpMessage message);
    OutgoingConnection connect(int peer, LaneKind kind) const;

    // For the transport's thread:
    void run();
    void accept_newcomers();
    void read_greetings();
    bool awaits_greeting(Newcomer& newcomer);

    const Tags tags_{kLargestTag};
    const TcpEndpoint endpoint_;
    const int rank_;
    const OnClose on_close_;
    TcpLane data_, control_;
    std::atomic<bool> is_refusing_{false};   // no descriptor is left for a connection that another rank has opened
    std::atomic<bool> is_exhausted_{false};  // none has been left for kRetry

    // These three belong to the transport's thread.
    std::list<Newcomer> newcomers_;
    bool may_accept_ = true;                      // false: accept_newcomers() is tried again at intervals
    TcpLane::Clock::time_point refuses_since_{};  // zero: this rank is not refusing connections
    BackgroundMover mover_;
};

}  // namespace dist_prims
