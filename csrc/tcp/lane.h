// A lane: the connections of one rank to the others for one kind of messages (data, or control), and the waits for
// these messages. TcpTransport has one lane of each kind, and passes messages to it.
//
// Each thread that waits moves the messages of all threads: it polls, then sleeps, until a connection is readable or
// writable, and then reads and writes. So a message wakes one thread, the thread that needs it. While no thread waits,
// the transport's own thread moves the messages (see transport.h).
//
// A connection carries messages in one direction, so two ranks may have two. An outgoing connection is opened by the
// first message to a rank. It is opened as well by a wait for a message from a rank that has not connected to this one:
// only a connection shows that the rank has gone.
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

    // For LaneRequest: see Transport::TransportRequest. wait() throws TransportError if the message has failed.
    WaitResult wait(TcpMessage& message, std::chrono::milliseconds limit);
    bool is_done(const TcpMessage& message);  // or has failed
    int source(const TcpMessage& message);
    void abort(TcpMessage& message);
    // The message is not needed any more. Its memory is not used afterwards, unless it has an owner.
    void release(const TcpMessagePtr& message);

    // Opens a connection to a rank if there is none.
    void open(int peer);
    // Takes a connection that another rank has opened, after its greeting.
    void add(int peer, Socket socket);
    // Marks on the connections to other ranks that this rank leaves, also on connections that are opened later. Waits
    // until the kernel has taken what was sent, but not for longer than `limit`.
    void leave(std::chrono::milliseconds limit);
    Transport::FailedPeer failed_peer();  // see Transport; the first such rank
    // Why a connection could not be opened for a message, where descriptors or ports were used up; else empty.
    std::string refusal();
    std::set<int> unanswering();                      // see Transport
    std::map<int, Transport::Delivered> delivered();  // see Transport
    // Fails all messages, also future ones, and closes all connections.
    void close(const std::string& reason);

    // Moves messages as far as possible without waiting.
    void progress();
    // Readable while progress() has something to do.
    int descriptor() const { return epoll_.descriptor(); }
    // Whether more is to be sent or received than the kernel's buffers hold.
    bool is_loaded();
    // Whether no thread waits, and none has waited since the last call. `waits`: the number of waits at the last call,
    // which the caller keeps.
    bool is_idle_since(std::uint64_t& waits);

private:
    struct Outgoing {
        OutgoingConnection connection;
        bool is_full = false;  // the kernel's buffer is full: epoll reports when it has space
    };
    struct Incoming {
        IncomingConnection connection;
        bool is_watched = true;  // by epoll; false: the connection has stalled, see IncomingConnection::is_stalled()
    };
    struct EndedConnection {
        Failure failure;
        Clock::time_point ended_at;
    };
    class LockAndFree;

    // All are called under the lock; sleep_and_move() unlocks while it sleeps.
    Outgoing* outgoing(int peer, bool has_message);
    void write_to(int peer);
    void end_outgoing(int peer, const Failure& failure);
    void read_from(int peer, bool may_leave_trailer);
    void read_stalled(int peer);
    void read_awaited(int peer);
    template <typename Condition>
    void read_where(const Condition& condition);
    void check_sender(TcpMessage& message);
    void check_open() const;
    bool has_unsent() const;
    std::vector<TcpMessagePtr> take_finished();
    bool sleep_and_move(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds limit,
                        const TcpMessage* own = nullptr);
    void handle_event(const epoll_event& event, bool may_leave_trailer);

    const Connect connect_;
    const OnGone on_gone_;
    const Socket epoll_;  // the descriptor of an epoll instance, which watches all connections and waiting_

    std::mutex mutex_;                  // of all below
    std::map<int, Outgoing> outgoing_;  // by peer, as are the next three
    std::map<int, Incoming> incoming_;
    std::map<int, EndedConnection> ended_outgoing_;  // nothing can be sent to these peers any more
    std::map<int, Failure> ended_incoming_;          // nothing can come from these peers any more
    bool is_leaving_ = false;
    Transport::FailedPeer failed_peer_;  // see failed_peer()
    std::string refusal_;                // see refusal()
    Inbox inbox_;
    std::vector<TcpMessagePtr> given_up_;  // released by the caller after a part was sent; each has an owner
    std::string close_reason_;             // empty as long as the lane is open
    WaitingThreads<TcpMessage> waiting_;
    Polling polling_;
    unsigned polls_ = 0;  // how often waits for incoming messages have polled
};

}  // namespace dist_prims
