// The rendezvous of the ranks of one host: every rank gets the shared memory of the group, and the exit descriptors of
// the other ranks' processes (common/process.h).
//
//     rank r                      rank 0
//     connects: Hello  ────────▶  watches the process of rank r from now on
//                      ◀────────  Introduction: the memory; rank 0 and its exit descriptor
//                         ...     the last rank has come
//                      ◀────────  Introduction: all other ranks, with the exit descriptors that rank r does not have
//
// Rank 0 listens at an abstract Unix address, which contains a random word. Other network namespaces cannot see the
// address, so every peer is on this host. Rank 0 accepts a rank only if it has the same user id and knows the word; it
// drops every other connection. The Hello lists the processes that rank r watches already for other groups: rank 0
// sends no further descriptor for these. Connections stay open until all ranks have come, so rank 0 notices a rank
// whose process ends and a rank that gives up. The other ranks notice both through `look`.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "../common/process.h"
#include "../common/shared_memory.h"
#include "membership.h"

namespace dist_prims {

// The parameters of one rank.
struct RendezvousOptions {
    int rank = 0, size = 1;  // among the ranks of this host
    RankNames names;         // for errors
    std::chrono::milliseconds timeout{0};
    // Called every 50 ms and after each signal, on the waiting thread. An exception from it ends the rendezvous.
    std::function<void()> look = [] {};
    // Called at the same times. Returns a rank that is known from another group to have ended, or -1.
    std::function<int()> ended = [] { return -1; };
};

// The result on one rank.
struct RendezvousResult {
    Descriptor memory;
    std::vector<ExitDescriptor> exits;  // of each rank's process; null for ranks of this process
};

// Rank 0: passes the word of this rendezvous to `publish_word`, and serves the memory to the ranks 1 to size - 1.
// Throws CommError if a rank dies, gives up or times out.
RendezvousResult host_rendezvous(const RendezvousOptions& options, Descriptor memory,
                                 const std::function<void(const std::string&)>& publish_word);

// Every other rank: asks rank 0. `word` returns the word that rank 0 has published, or an empty string before that.
RendezvousResult join_rendezvous(const RendezvousOptions& options, const std::function<std::string()>& word);

}  // namespace dist_prims
