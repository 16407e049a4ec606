// A lane: the connections of one rank to the others for one kind of messages, and the waits for these messages.
//
// Whichever thread waits moves the messages of all: it polls, then sleeps, until a connection is readable or writable
// and then reads and writes. So a message wakes one thread, the one that needs it. While no thread waits, the
// transport's own thread takes over (see transport.h).
//
// A connection is opened by the first message to a rank. A rank that waits for a message from a rank with which it has
// no connection opens one too, since only a connection tells that the other side has gone.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "connection.h"
#include "polling.h"
#include "waiting_threads.h"

struct epoll_event;

namespace dist_prims {

class TcpLane {
public:
    using Clock = std::chrono::steady_clock;
    enum class WaitResult { kDone, kAborted, kLate };
    using Connect = std::function<OutgoingConnection(int peer)>;

    using OnGone = std::function<void(int peer, const Failure& failure)>;

    // `polls`: see Polling. `on_gone`: see TcpTransport.
    TcpLane(Connect connect, bool polls, OnGone on_gone = nullptr);

    // These throw TransportError if the lane has been closed.
    void send(const TcpMessagePtr& message);
    void receive(const TcpMessagePtr& message);

    // Throws TransportError if the message has failed.
    WaitResult wait(TcpMessage& message, std::chrono::milliseconds limit);
    bool is_done(const TcpMessage& message);  // or has failed
    int source(const TcpMessage& message);
    void abort(TcpMessage& message);
    // The message is not needed any more. Its memory is not used afterwards, unless it has an owner.
    void release(const TcpMessagePtr& message);

    // Opens a connection to a rank if there is none.
    void open(int peer);
    // A connection that another rank has opened.
    void add(int peer, Socket socket);
    // Marks on the connections to other ranks that this rank leaves, on later ones too. Waits until the kernel has
    // taken what was sent, but not for longer than `limit`.
    void leave(std::chrono::milliseconds limit);
    // A rank whose connection to this one has ended although it has not left; kAnyone if there is none.
    int dead_rank();
    // Why a connection could not be opened for a message, where descriptors or ports were used up; else empty.
    std::string refusal();
    // The peers of which is_unanswered() holds.
    std::set<int> unanswering();
    std::map<int, Transport::Delivered> delivered();  // see Transport
    // Fails all messages, also future ones.
    void close(const std::string& reason);

    // Moves messages as far as possible without waiting.
    void progress();
    // Readable while progress() has something to do.
    int descriptor() const { return events_.descriptor(); }
    // Whether much is to be sent or received that the kernel's buffers do not hold.
    bool is_loaded();
    // Whether no thread waits, and none has since `waits`, the number of waits so far, which is brought up to date.
    bool is_idle_since(std::uint64_t& waits);

private:
    struct Outgoing {
        OutgoingConnection connection;
        bool is_full = false;  // the kernel's buffer: the connection is watched for space
    };
    struct Incoming {
        IncomingConnection connection;
        bool is_watched = true;
    };
    struct Gone {
        Failure failure;
        Clock::time_point since;
    };
    class AwaitedScope;
    class Guard;

    Outgoing* outgoing(int peer, bool has_message);
    void flush(int peer);
    void end_outgoing(int peer, const Failure& failure);
    void read(int peer);
    void resume(int peer);
    void check_peer(TcpMessage& message);
    void check_open() const;
    bool has_unsent() const;
    std::vector<TcpMessagePtr> take_ended_and_given_up();
    bool move(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds limit, const TcpMessage* own = nullptr);
    void handle(const epoll_event& event);

    const Connect connect_;
    const OnGone on_gone_;
    const Socket events_;  // of epoll

    std::mutex mutex_;                  // of all below
    std::map<int, Outgoing> outgoing_;  // by peer
    std::map<int, Incoming> incoming_;
    std::map<int, Gone> gone_;      // ranks to which nothing can be sent any more
    std::map<int, Failure> ended_;  // ranks from which nothing can come any more, and why
    bool is_leaving_ = false;
    int dead_rank_ = Transport::kAnyone;  // see dead_rank()
    std::string refusal_;                 // see refusal()
    Inbox inbox_;
    std::vector<TcpMessagePtr> given_up_;  // sent in part, with an owner
    std::string closed_;                   // why; empty as long as the lane is open
    WaitingThreads<TcpMessage> waiting_;
    Polling polling_;
};

}  // namespace dist_prims
