#include "hosts.h"

#include <algorithm>
#include <numeric>

namespace dist_prims {

std::vector<int> Hosts::local_ranks() const {
    std::vector<int> found(static_cast<std::size_t>(size()), -1);
    for (std::size_t local_rank = 0; local_rank < ranks[mine].size(); ++local_rank)
        found[static_cast<std::size_t>(ranks[mine][local_rank])] = static_cast<int>(local_rank);
    return found;
}

std::vector<std::size_t> Hosts::by_rank() const {
    std::vector<std::size_t> found(static_cast<std::size_t>(size()));
    for (std::size_t host = 0; host < ranks.size(); ++host) {
        for (const int rank : ranks[host]) found[static_cast<std::size_t>(rank)] = host;
    }
    return found;
}

std::vector<int> Hosts::sizes() const {
    std::vector<int> found;
    for (const auto& each : ranks) found.push_back(static_cast<int>(each.size()));
    return found;
}

std::vector<int> Hosts::remote_ranks() const {
    std::vector<int> found;
    for (std::size_t host = 0; host < ranks.size(); ++host) {
        if (host != mine) found.insert(found.end(), ranks[host].begin(), ranks[host].end());
    }
    return found;
}

int Hosts::size() const {
    const std::vector<int> all = sizes();
    return std::accumulate(all.begin(), all.end(), 0);
}

int Hosts::largest() const {
    const std::vector<int> all = sizes();
    return *std::max_element(all.begin(), all.end());
}

}  // namespace dist_prims
