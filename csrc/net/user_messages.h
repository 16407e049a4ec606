// The messages of users to and from ranks of other hosts, and their receives from any rank.
//
// The thread that waits for a message moves it. For messages that no thread waits for, a thread of this class looks at
// intervals which of them are over. It sleeps when there have been none for a while.
//
// Where the transport has claims, a receive from any rank is posted twice: in shared memory, and at the transport. The
// first message that takes its claim is received, and the receive in the other place is withdrawn.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "../shm/p2p.h"
#include "remote_peers.h"

namespace dist_prims {

// Must be made by make_shared: its thread and receives from any rank refer to it. `remote` and `p2p` must exist until
// close().
class UserMessages : public std::enable_shared_from_this<UserMessages> {
public:
    using Milliseconds = std::chrono::milliseconds;
    using Done = PointToPoint::Done;
    struct Request;
    using Handle = std::shared_ptr<Request>;
    // The memory of a message, which `owner` keeps.
    struct Memory {
        std::byte* data;
        std::size_t bytes;
        Transport::Owner owner;
    };

    UserMessages(RemotePeers& remote, PointToPoint& p2p, Membership& membership)
        : remote_(remote), p2p_(p2p), membership_(membership) {}

    // `done`: as in PointToPoint. `peer` is a rank of another host, or any rank if the transport carries messages
    // within a host as well; a receive may also be from Transport::kAnyone.
    Handle send(int peer, int tag, const Memory& memory, Milliseconds timeout, Done done);
    Handle receive(int peer, int tag, const Memory& memory, Milliseconds timeout, Done done);

    // Returns when the request is over, with or without an error; after `limit` it ends the group. Throws what is no
    // failure of the message, such as a KeyboardInterrupt.
    void wait(const Handle& request, Milliseconds limit);
    // The sender of a message that has come.
    int source(const Request& request) const;

    // Ends all requests, now and later, with this reason. Any thread may call it, any number of times.
    void close(std::exception_ptr reason);

private:
    enum class State { kOpen, kEnding, kOver };

    void receive_from_any(int tag, const Memory& memory, Milliseconds timeout, const Handle& request);
    Handle begin(const Handle& request);
    RemotePeers::Handle remote_of(const Handle& request);
    bool begin_wait(const Handle& request, Milliseconds limit, Clock::time_point until);
    void move_until_over(const Handle& request, Milliseconds limit, Clock::time_point until);
    void move_from_any(const Handle& request, const RemotePeers::Handle& remote);
    void end_by(const Handle& request, const std::function<void()>& act);
    std::function<void()> finish(const Handle& request, std::exception_ptr error, bool in_memory);
    void run();
    std::vector<Handle> unawaited_requests() const;
    void look_at(const Handle& request);

    RemotePeers& remote_;
    PointToPoint& p2p_;
    Membership& membership_;

    std::mutex mutex_;                    // of all below, and of the states of requests
    std::unordered_set<Handle> pending_;  // that are not over
    std::exception_ptr closed_;           // why; null as long as requests can begin
    bool is_asleep_ = false;              // the thread
    std::condition_variable changed_, wakes_;
    Thread thread_;
};

}  // namespace dist_prims
