// The hosts of a group, and the ranks of the group on each host. MultiHostGroup and Piggyback ask for them.
#pragma once

#include <cstddef>
#include <vector>

namespace dist_prims {

struct Hosts {
    std::vector<std::vector<int>> ranks;  // by host, in order
    std::size_t mine = 0;                 // the index of this host

    std::vector<int> local_ranks() const;      // by rank of the group: the rank on this host, or -1
    std::vector<std::size_t> by_rank() const;  // by rank of the group: the index of its host
    std::vector<int> sizes() const;            // the number of ranks of each host
    std::vector<int> remote_ranks() const;     // the ranks of other hosts
    int size() const;                          // the number of ranks of the group
};

}  // namespace dist_prims
