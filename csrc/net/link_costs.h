// What a message and a byte cost between two ranks of different hosts, measured in the first agreement of a group (see
// multi_host.h). The ranks choose schedules by these figures.
//
// One rank, in measure_link(), sends small messages, which the other rank returns. Then it sends blocks of growing
// size, which the other rank acknowledges, until they have taken long enough: some 25 ms at 1 Gbit/s, 50 at 100 Mbit/s.
#pragma once

#include <chrono>
#include <cstdint>

#include "remote_peers.h"

namespace dist_prims {

struct LinkCosts {
    double alpha = 0, beta = 0;  // seconds a message, seconds a byte; both 0: not measured

    // The costs of a measured link as one number that is not 0, in nanoseconds and femtoseconds, which an agreement can
    // carry. unpacked(0) is not measured.
    std::uint64_t packed() const;
    static LinkCosts unpacked(std::uint64_t packed);
};

// Measures the link to `peer`, which calls help_measure_link() at the same time. `network` is a number of the network
// namespace of this rank: if the peer has the same, there is no link between the two, and nothing is measured.
LinkCosts measure_link(RemotePeers& remote, int peer, std::uint64_t network, std::chrono::milliseconds timeout);
void help_measure_link(RemotePeers& remote, int peer, std::uint64_t network, std::chrono::milliseconds timeout);

}  // namespace dist_prims
