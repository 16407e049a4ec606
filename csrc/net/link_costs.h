// What a message and a byte cost between two ranks of different hosts, measured when a group is made. The ranks choose
// schedules by these figures.
//
// The first of the two ranks sends small messages, which the other one returns, and then blocks of growing size, which
// it acknowledges, until they have taken long enough: some 25 ms at 1 Gbit/s, 50 at 100 Mbit/s.
#pragma once

#include <chrono>
#include <cstdint>

#include "remote_peers.h"

namespace dist_prims {

struct LinkCosts {
    double alpha = 0, beta = 0;  // seconds a message, seconds a byte; both 0: not measured

    // As one number that is not 0, in nanoseconds and femtoseconds, so that an agreement can carry it.
    std::uint64_t packed() const;
    static LinkCosts unpacked(std::uint64_t packed);
};

// Measures the link to `peer`, which calls help_measure_link() at the same time. `network` is a number of the network
// namespace of this rank: if the peer has the same, there is no link between the two, and nothing is measured.
LinkCosts measure_link(RemotePeers& remote, int peer, std::uint64_t network, std::chrono::milliseconds timeout);
void help_measure_link(RemotePeers& remote, int peer, std::uint64_t network, std::chrono::milliseconds timeout);

}  // namespace dist_prims
