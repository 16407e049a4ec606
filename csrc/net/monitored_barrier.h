// The monitored barrier of a group that spans hosts, by messages without data.
//
//     rank 0        receives one from every rank, or names the ranks that sent none; then sends one to each
//     other ranks   send one to rank 0, and wait for its answer
//
// Rank 0 posts all receives at once and waits for one after the other. After the limit rank 0 only checks which
// messages have arrived.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "../shm/p2p.h"
#include "remote_peers.h"

namespace dist_prims {

class MonitoredBarrier {
public:
    // `local_ranks`: by rank of the group, the rank on this host, or -1.
    MonitoredBarrier(RemotePeers& remote, PointToPoint& p2p, const std::vector<int>& local_ranks, int rank,
                     std::chrono::milliseconds limit)
        : remote_(remote), p2p_(p2p), local_ranks_(local_ranks), rank_(rank), limit_(limit) {}

    // Returns when all ranks are in the barrier. After the limit it ends the group, and names the ranks that are not:
    // the first one, or all of them.
    void run(bool names_all);

private:
    // A message: one of the two is not null.
    struct Request {
        PointToPoint::Handle local;
        RemotePeers::Handle remote;
    };

    Request send(int peer) const;
    Request receive(int peer) const;
    bool wait(const Request& request, Clock::time_point until) const;
    void release_all() const;
    [[noreturn]] void give_up(int awaited, const std::string& why) const;
    int local_rank(int peer) const { return local_ranks_[static_cast<std::size_t>(peer)]; }

    RemotePeers& remote_;
    PointToPoint& p2p_;
    const std::vector<int>& local_ranks_;
    const int rank_;
    const std::chrono::milliseconds limit_;
};

}  // namespace dist_prims
