#include "hosts.h"

namespace dist_prims {

std::vector<int> Hosts::local_ranks() const {
    std::vector<int> local_ranks(static_cast<std::size_t>(size()), -1);
    for (std::size_t local_rank = 0; local_rank < ranks[mine].size(); ++local_rank)
        local_ranks[static_cast<std::size_t>(ranks[mine][local_rank])] = static_cast<int>(local_rank);
    return local_ranks;
}

std::vector<std::size_t> Hosts::by_rank() const {
    std::vector<std::size_t> hosts(static_cast<std::size_t>(size()));
    for (std::size_t host = 0; host < ranks.size(); ++host) {
        for (const int rank : ranks[host]) hosts[static_cast<std::size_t>(rank)] = host;
    }
    return hosts;
}

std::vector<int> Hosts::sizes() const {
    std::vector<int> sizes;
    for (const auto& of_host : ranks) sizes.push_back(static_cast<int>(of_host.size()));
    return sizes;
}

std::vector<int> Hosts::remote_ranks() const {
    std::vector<int> remote;
    for (std::size_t host = 0; host < ranks.size(); ++host) {
        if (host != mine) remote.insert(remote.end(), ranks[host].begin(), ranks[host].end());
    }
    return remote;
}

int Hosts::size() const {
    int size = 0;
    for (const auto& of_host : ranks) size += static_cast<int>(of_host.size());
    return size;
}

}  // namespace dist_prims
