// Messages of collectives to any rank of a group: in shared memory to the ranks of this host, through the transport to
// the others. schedule_executor.cpp calls it, in the thread that makes the call.
#pragma once

#include <utility>
#include <vector>

#include "../shm/p2p.h"
#include "remote_peers.h"
#include "tags.h"

namespace dist_prims {

class Router {
public:
    // A posted message. One of the two is null.
    struct RoutedRequest {
        PointToPoint::Handle local;
        RemotePeers::Handle remote;
    };

    // `local_ranks`: by rank of the group, the rank on this host, or -1; empty if all ranks are on this host.
    // `remote`: null in a group of one host.
    Router(PointToPoint& p2p, std::vector<int> local_ranks, RemotePeers* remote)
        : p2p_(p2p), local_ranks_(std::move(local_ranks)), remote_(remote) {}

    // The next number for messages that belong together, such as the messages of a segment. All ranks make the same
    // calls, so a message has the same number, and with it the same tag, on both sides.
    std::uint64_t next() { return std::exchange(next_, Tags::segment_after(next_)); }

    // `owner` of the memory: see Transport.
    RoutedRequest send(int to, std::uint64_t number, const std::byte* data, std::size_t bytes,
                       std::chrono::milliseconds timeout, Transport::Owner owner = nullptr);
    RoutedRequest receive(int from, std::uint64_t number, std::byte* data, std::size_t bytes,
                          std::chrono::milliseconds timeout, Transport::Owner owner = nullptr);
    // Waits for local requests first: they make progress only while a thread waits, and remote ones always.
    void wait(const std::vector<RoutedRequest>& requests);

    bool spans_hosts() const { return remote_ != nullptr; }

    // Called after an error: ends the group if it has not ended. Afterwards no message uses its memory, except messages
    // whose owner the transport still keeps.
    void end();

private:
    int local_rank(int rank) const {
        return local_ranks_.empty() ? rank : local_ranks_[static_cast<std::size_t>(rank)];
    }

    PointToPoint& p2p_;
    const std::vector<int> local_ranks_;
    RemotePeers* const remote_;
    std::uint64_t next_ = 0;
};

}  // namespace dist_prims
