#include "stamps.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

namespace dist_prims {
namespace {

using Stamp = std::atomic<std::uint64_t>;

Stamp& stamp(std::byte* page, std::size_t number) {
    return reinterpret_cast<Stamp*>(page)[number];
}

std::uint64_t random_number() {
    std::random_device device;
    return std::uint64_t{device()} << 32 | device();
}

}  // namespace

Stamps::Stamps() : Stamps(random_number()) {}

Stamps::Stamps(std::uint64_t random)
    : exporter_(Exporter::instance()), page_(exporter_.allocate(kCount * sizeof(Stamp))), token_(random >> 1) {}

void Stamps::set(std::size_t number, std::uint64_t round) {
    if (number < kCount) stamp(page_, number).store(token_ + round, std::memory_order_release);
}

bool Stamps::All::are_set(std::size_t number, std::uint64_t round) const {
    if (number >= kCount) return false;
    for (std::size_t rank = 0; rank < tokens.size(); ++rank) {
        if (stamp(mapped.places[rank], number).load(std::memory_order_acquire) != tokens[rank] + round) return false;
    }
    return true;
}

void Stamps::announce(SlotExchange& slots) const {
    const Announcement own{exporter_.ref_of(page_, kCount * sizeof(Stamp)), token_};
    std::memcpy(slots.mine(), &own, sizeof own);
}

std::vector<Stamps::Announcement> Stamps::announced(const SlotExchange& slots) {
    std::vector<Announcement> announcements(static_cast<std::size_t>(slots.size()));
    for (int rank = 0; rank < slots.size(); ++rank)
        std::memcpy(&announcements[static_cast<std::size_t>(rank)], slots.theirs(rank), sizeof(Announcement));
    return announcements;
}

Stamps::All Stamps::map_tensors(HostSegment& host_segment, const std::vector<Announcement>& announced) const {
    std::vector<SharedTensorRef> tensor_refs;
    All all;
    for (const auto& [tensor_ref, token] : announced) {
        tensor_refs.push_back(tensor_ref);
        all.tokens.push_back(token);
    }
    all.mapped = dist_prims::map_tensors(host_segment, tensor_refs, page_);
    return all;
}

}  // namespace dist_prims
