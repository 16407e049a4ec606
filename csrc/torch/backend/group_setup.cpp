#include "group_setup.h"

#include <algorithm>
#include <map>

#include "../../common/thread.h"
#include "../../shm/rendezvous.h"

namespace dist_prims {
namespace {

std::vector<std::string> rank_descriptions(const std::vector<std::string>& hosts) {
    std::vector<std::string> descriptions;
    for (const std::string& host : hosts)
        descriptions.push_back("rank " + std::to_string(descriptions.size()) + " on host " + host);
    return descriptions;
}

// The group in errors by the global ranks of its ranks: " of group [2, 3]". Empty if each rank is its own global rank.
std::string group_text(const std::vector<uint64_t>& ranks) {
    constexpr std::size_t kMostListed = 8;
    std::string text;
    bool is_renumbered = false;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
        is_renumbered |= ranks[rank] != rank;
        if (rank < kMostListed) text += (rank ? ", " : "") + std::to_string(ranks[rank]);
    }
    if (ranks.size() > kMostListed) text += ", ... " + std::to_string(ranks.back());
    return is_renumbered ? " of group [" + text + "]" : "";
}

// The transport between hosts. Takes the endpoints out of the setup.
std::unique_ptr<Transport> make_transport(int rank, const Setup& setup) {
    if (setup.mpi) return std::move(setup.mpi->transport);
    if (!setup.ucx) return std::make_unique<TcpTransport>(std::move(*setup.tcp), rank);
    return setup.ucx->own->connect({std::move(setup.ucx->addresses), std::move(*setup.tcp), rank});
}

// The key in the store under which the first rank of this host publishes a word that leads the others to its memory.
std::string rendezvous_key(const Hosts& hosts) {
    return "shared memory/" + std::to_string(hosts.ranks[hosts.mine].front());
}

}  // namespace

Hosts hosts_of(const std::vector<std::string>& names, int rank) {
    Hosts hosts;
    std::map<std::string, std::size_t> host_numbers;  // in the order of their first ranks
    for (std::size_t other = 0; other < names.size(); ++other) {
        const auto [entry, is_new] = host_numbers.try_emplace(names[other], hosts.ranks.size());
        if (is_new) hosts.ranks.emplace_back();
        hosts.ranks[entry->second].push_back(static_cast<int>(other));
    }
    hosts.mine = host_numbers.at(names[static_cast<std::size_t>(rank)]);
    return hosts;
}

std::shared_ptr<HostSegment> make_host_segment(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                               const Setup& setup, const Hosts& hosts,
                                               const CreationFailure& creation_failure,
                                               const std::function<int()>& ended) {
    // 1. Which ranks are on this host, and how large their slots are.
    const std::vector<int>& here = hosts.ranks[hosts.mine];
    const std::vector<int> local_rank_of = hosts.local_ranks();
    const int local_rank = local_rank_of[static_cast<std::size_t>(rank)], local_size = static_cast<int>(here.size());
    RankNames names{.group = group_text(setup.ranks)};
    if (hosts.ranks.size() > 1) names = {here, rank_descriptions(setup.hosts), names.group};
    std::size_t slot = std::max(setup.slot_bytes, HostSegment::min_slot_bytes(local_size));
    if (hosts.ranks.size() > 1) slot = std::max(slot, MultiHostGroup::kMinSlotBytes);
    // 2. The first of them makes the memory. Each reserves pages of it, on its own NUMA node.
    const std::string key = rendezvous_key(hosts);
    const auto ended_local_rank = [&] {
        const int ended_rank = ended();
        return ended_rank < 0 ? -1 : local_rank_of[static_cast<std::size_t>(ended_rank)];
    };
    const RendezvousOptions options{
        local_rank, local_size, names, setup.timeout, [&] { creation_failure.check(); }, ended_local_rank};
    const auto publish = [&](const std::string& word) { store->set(key, word); };
    const auto read = [&] { return store->check({key}) ? store->get_to_str(key) : std::string(); };
    RendezvousResult rendezvous = local_rank == 0
                                      ? host_rendezvous(options, HostSegment::make_memory(local_size, slot), publish)
                                      : join_rendezvous(options, read);
    auto host_segment = std::make_shared<HostSegment>(std::make_shared<Mapping>(rendezvous.memory), local_rank,
                                                      local_size, slot, names);
    if (local_rank > 0) HostSegment::reserve_pages(rendezvous.memory, local_rank, local_size, slot);
    // 3. From here on, each wait in the group looks for deaths and for failures of other ranks.
    host_segment->one_shot_bytes = setup.one_shot_bytes;
    host_segment->membership.watch(std::move(rendezvous.exits));
    host_segment->membership.on_wait([creation_failure] { creation_failure.check(); }, true);
    return host_segment;
}

void delete_rendezvous_key(c10d::Store& store, int rank, const Hosts& hosts) {
    const std::vector<int>& here = hosts.ranks[hosts.mine];
    if (here.size() > 1 && rank == here.front()) caught([&] { store.deleteKey(rendezvous_key(hosts)); });
}

std::shared_ptr<Execution> make_execution(const std::shared_ptr<HostSegment>& host_segment, int rank,
                                          const Setup& setup, Hosts hosts) {
    const int size = static_cast<int>(setup.hosts.size());
    if (hosts.ranks.size() > 1) {
        auto transport = make_transport(rank, setup);
        return make_multi_host_execution(host_segment, rank, size, std::move(hosts), std::move(transport),
                                         setup.choose);
    }
    host_segment->membership.join_groups_of_process();
    return make_single_host_execution(host_segment, rank, size);
}

}  // namespace dist_prims
