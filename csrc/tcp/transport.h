// The messages between hosts over TCP, in this library's own protocol.
//
// gloo has a thread that reads all sockets and wakes the thread that waits, and it sends no message before the receiver
// has said that it expects it. Here the thread that waits reads the sockets itself, and a message is sent at once: one
// thread is woken for a message, where gloo wakes three.
//
// There are two lanes, each with connections of its own:
//
//     data      is read by the threads that wait for its messages
//     control   notices and diagnosis (see net/tags.h); is always read by the transport's thread
//
// The transport's thread also accepts connections and checks their greetings. When no other thread has waited for the
// messages of the data lane for a moment, or one that is about to wait for something else asks for it, it moves these,
// too: a rank that computes still receives and sends.
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

// What a rank needs to begin: a non-blocking socket at which it listens, the addresses of all ranks by rank, as
// connect_to() takes them, and the key of the group (see greeting.h).
struct TcpEndpoint {
    Socket listening;
    std::vector<std::string> addresses{};
    std::string key{};
    bool polls = false;  // see Polling
};

class TcpTransport : public Transport {
public:
    static constexpr int kLargestTag = 0x7fffffff;

    using OnClose = std::function<void(const std::string& reason)>;

    // `on_close` is called when the transport has closed all its connections because a time limit has passed. `on_gone`
    // is called by any thread, once or twice, when the connection to or from a rank has ended on the control lane; it
    // must not call the transport.
    TcpTransport(TcpEndpoint endpoint, int rank, OnClose on_close = nullptr, TcpLane::OnGone on_gone = nullptr);
    ~TcpTransport() override;
    TcpTransport(const TcpTransport&) = delete;

    int largest_tag() const override { return kLargestTag; }
    Handle send(int to, int tag, const std::byte* data, std::size_t bytes, Owner owner) override;
    Handle receive(int from, int tag, std::byte* data, std::size_t bytes, Owner owner) override;
    Handle receive_from_any(int tag, std::byte* data, std::size_t bytes, Owner owner, const ClaimPtr& claim) override;
    void progress() override { data_.progress(); }
    void move_in_background() override;
    int dead_rank() override;
    std::vector<int> unanswering() override;
    std::map<int, Delivered> delivered() override { return data_.delivered(); }
    std::string refusal(bool now) override;
    void leave() override;

    // Opens a connection to a rank on the control lane, so that the end of the rank is noticed.
    void watch(int peer) { control_.open(peer); }
    // Fails all messages, also future ones, and closes all connections.
    void close(const std::string& reason);

private:
    enum LaneKind { kData, kControl, kLanes };
    // A connection whose greeting has not come yet.
    struct Newcomer {
        Socket socket;
        TcpLane::Clock::time_point since;
        std::size_t bytes = 0;
        Greeting greeting{};
    };

    TcpLane& lane_of(int tag) { return tags_.is_control(tag) ? control_ : data_; }
    Handle post(TcpMessage receive);
    OutgoingConnection connect(int peer, LaneKind kind) const;
    void run();
    void accept();
    void read_greetings();
    bool read_greeting(Newcomer& newcomer);

    const Tags tags_{kLargestTag};
    const TcpEndpoint endpoint_;
    const int rank_;
    const OnClose on_close_;
    TcpLane data_, control_;
    std::atomic<bool> is_refusing_{false};   // no descriptor is left for a connection
    std::atomic<bool> is_exhausted_{false};  // this has been so for a while

    std::list<Newcomer> newcomers_;  // this and the next two belong to the thread
    bool may_accept_ = true;
    TcpLane::Clock::time_point refuses_since_{};
    BackgroundMover mover_;
};

}  // namespace dist_prims
