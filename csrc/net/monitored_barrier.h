// The monitored barrier of a group that spans hosts: a barrier after whose limit the error names the ranks that are
// late. torch's monitored_barrier() calls it. It sends messages without data:
//
//     rank 0        receives a message from every rank; then sends one to each
//     other ranks   send a message to rank 0, and wait for its reply
#pragma once

#include <chrono>
#include <vector>

#include "../shm/p2p.h"
#include "remote_peers.h"

namespace dist_prims {

// Returns when all ranks are in the barrier. After the limit it ends the group, and throws a CommError that names the
// late ranks.
//
// Args:
//     local_ranks: by rank of the group, the rank on this host, or -1.
//     rank: this rank of the group.
//     limit: for all ranks to arrive, and again for each message that lets a rank go on.
//     names_all: whether rank 0 names all late ranks, or only the first.
void monitored_barrier(RemotePeers& remote, PointToPoint& p2p, const std::vector<int>& local_ranks, int rank,
                       std::chrono::milliseconds limit, bool names_all);

}  // namespace dist_prims
