// send() and recv() of users, to and from ranks of other hosts, and their receives from any rank. The adapter for torch
// calls UserMessages; messages of users within a host go through PointToPoint directly.
//
// The thread that waits for a message moves it. If no thread waits for a message, a thread of this class looks at
// intervals whether it is over. This thread sleeps when there has been no such message for a while.
//
// Where the transport has claims, a receive from any rank is posted in two places: in shared memory, and at the
// transport. They share a claim. The first message that takes it is received, and the other receive is withdrawn.
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

// Must be made by make_shared: its thread and receives refer to it. `remote` and `p2p` must exist until close().
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

    // Args:
    //     peer: a rank of another host, or any rank if the transport carries messages within a host as well. For a
    //         receive also Transport::kAnyone.
    //     done: called when the request is over; see PointToPoint::Done.
    Handle send(int peer, int tag, const Memory& memory, Milliseconds timeout, Done done);
    Handle receive(int peer, int tag, const Memory& memory, Milliseconds timeout, Done done);

    // Returns when the request is over, with or without an error, which `done` gets. After `limit` the group ends.
    // Throws only what a signal handler throws, such as a KeyboardInterrupt.
    void wait(const Handle& request, Milliseconds limit);
    // The sender of a message that has come.
    int source(const Request& request) const;

    // Ends all requests with this reason, and refuses later ones. Any thread may call it, any number of times.
    void close(std::exception_ptr reason);

private:
    enum class State { kOpen, kEnding, kOver };  // kEnding: `done` is being called

    void receive_from_any(int tag, const Memory& memory, Milliseconds timeout, const Handle& request);
    Handle start(const Handle& request);
    RemotePeers::Handle remote_of(const Handle& request);
    bool is_first_to_wait(const Handle& request, Milliseconds limit, Clock::time_point until);
    void wait_for_remote(const Handle& request, Milliseconds limit, Clock::time_point until);
    void wait_for_either(const Handle& request, const RemotePeers::Handle& remote);
    void end_with(const Handle& request, const std::function<void()>& act);
    std::function<void()> finish(const Handle& request, std::exception_ptr error, bool in_shared_memory);
    void run();
    std::vector<Handle> unawaited_requests() const;
    void end_if_over(const Handle& request);

    RemotePeers& remote_;
    PointToPoint& p2p_;
    Membership& membership_;

    std::mutex mutex_;                    // of all below, and of the requests
    std::unordered_set<Handle> pending_;  // the open requests
    std::exception_ptr close_reason_;     // null as long as requests can begin
    bool is_asleep_ = false;              // the thread sleeps until there is a request
    std::condition_variable changed_, wakes_;
    Thread thread_;
};

}  // namespace dist_prims
