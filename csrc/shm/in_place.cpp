#include "in_place.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../common/core_share.h"
#include "../common/kernels.h"
#include "../common/shares.h"
#include "../common/streaming.h"
#include "../common/trace.h"

namespace dist_prims {
namespace {

constexpr std::size_t kBlock = 16 * 1024;         // bytes of a tensor that are reduced at a time: they stay in L1
constexpr std::size_t kDeferredBlock = 4 * 1024;  // smaller: the next block, which is prefetched, must fit as well
// The bytes that a thread reads for one share, at least. There are two shares for each thread, at least: for less, the
// start of a thread takes longer than the thread saves. A thread that is late, or slow, does fewer shares.
constexpr std::size_t kReadForShare = 2 << 20;

}  // namespace

std::vector<SharedTensorRef> tensor_refs_of(const SlotExchange& slots) {
    std::vector<SharedTensorRef> tensor_refs;
    for (int peer = 0; peer < slots.size(); ++peer) tensor_refs.push_back(slots.call(peer).tensor_ref);
    return tensor_refs;
}

MappedTensors map_tensors(HostSegment& host_segment, const std::vector<SharedTensorRef>& tensor_refs, std::byte* mine) {
    if (!std::all_of(tensor_refs.begin(), tensor_refs.end(),
                     [](const SharedTensorRef& tensor_ref) { return tensor_ref.is_shared(); }))
        return {};
    SlotExchange& slots = host_segment.slots;
    MappedTensors mapped;
    bool is_agreed = true, can_map_all = true;
    for (int peer = 0; peer < slots.size(); ++peer) {
        const SharedTensorRef& tensor_ref = tensor_refs[static_cast<std::size_t>(peer)];
        is_agreed = is_agreed && host_segment.importer.is_agreed(tensor_ref);
        if (peer == slots.rank()) {
            mapped.places.push_back(mine);
        } else if (const auto memory = host_segment.importer.map(host_segment.membership.process(peer), tensor_ref)) {
            mapped.memory.push_back(memory);
            mapped.places.push_back(memory->data() + tensor_ref.offset);
        } else {
            can_map_all = false;
        }
    }
    if (is_agreed) return mapped;
    *slots.mine() = static_cast<std::byte>(can_map_all);
    slots.phase();
    for (int peer = 0; peer < slots.size(); ++peer) {
        if (*slots.theirs(peer) == std::byte{0}) return {};
    }
    for (const SharedTensorRef& tensor_ref : tensor_refs) host_segment.importer.agree(tensor_ref);
    return mapped;
}

void finish_in_place(HostSegment& host_segment, const std::byte* data, std::size_t bytes) {
    host_segment.slots.phase();
    host_segment.slots.check_abort();
    if (Exporter::instance().ref_of(data, bytes).is_shared()) return;
    throw std::runtime_error(host_segment.membership.own_name() +
                             ": the result of a collective is lost: another collective on the same tensor failed at "
                             "the same time; fill the tensor again before you use it");
}

void InPlace::fold_share(std::size_t bytes, const DeferredInput& deferred) {
    const TraceSpan span(TraceKind::kReduce, bytes / places_.size());
    const Range own = share_of(rank_, places_.size(), bytes);
    const std::size_t length = own.end - own.begin, shares = length * places_.size() / kReadForShare;
    const std::size_t threads = shares < 4 ? 1 : std::min(threads_of_rank(), shares / 2);
    if (threads == 1) return fold_range(own, deferred);
    do_shares(threads, shares, [&](std::size_t number) {
        const Range part = share_of(number, shares, length);
        InPlace(*this).fold_range({own.begin + part.begin, own.begin + part.end}, deferred);
    });
}

// Each element is reduced by one thread, so its bits do not depend on the ranges.
void InPlace::fold_range(Range range, const DeferredInput& deferred) {
    for (const auto& [at, piece] : deferred.runs(range)) {
        if (!piece)
            fold_shared(at);
        else if (piece->data)
            fold_deferred(piece->within(at));
    }
    end_past_cache();  // on each thread: it orders the copies of its own thread only
}

// Reduces a range whose input is in the shared tensors of all ranks.
void InPlace::fold_shared(Range range) {
    for (std::size_t at = range.begin; at < range.end; at += kBlock) {
        const std::size_t bytes = std::min(kBlock, range.end - at);
        fold_block(at, bytes, places_[rank_] + at, places_[rank_] + at);
        for (std::size_t peer = 0; peer < places_.size(); ++peer) {
            if (peer != rank_) std::memcpy(places_[peer] + at, places_[rank_] + at, bytes);
        }
    }
}

// Each block is computed in a local buffer, and then copied to all tensors. The tensors of the other ranks have just
// been read, so they are in the cache and are written normally. This rank's tensor is written past the cache.
void InPlace::fold_deferred(const DeferredInput::Piece& piece) {
    alignas(64) std::byte block[kDeferredBlock];
    fetch(piece.at.begin, piece.at.end);
    for (std::size_t at = piece.at.begin; at < piece.at.end; at += kDeferredBlock) {
        const std::size_t bytes = std::min(kDeferredBlock, piece.at.end - at);
        fetch(at + kDeferredBlock, piece.at.end);
        scale(dtype_, block, piece.data + (at - piece.at.begin), piece.factor, bytes / size_of(dtype_));
        fold_block(at, bytes, block, block);
        for (std::size_t peer = 0; peer < places_.size(); ++peer) {
            if (peer == rank_)
                copy_past_cache(places_[peer] + at, block, bytes);
            else
                std::memcpy(places_[peer] + at, block, bytes);
        }
    }
}

// Prefetches a block of the other ranks' tensors, which is reduced next.
void InPlace::fetch(std::size_t begin, std::size_t end) const {
    for (std::size_t at = begin; at < std::min(begin + kDeferredBlock, end); at += kCacheLine) {
        for (std::size_t peer = 0; peer < places_.size(); ++peer) {
            if (peer != rank_) __builtin_prefetch(places_[peer] + at, 1);
        }
    }
}

void InPlace::fold_block(std::size_t at, std::size_t bytes, const std::byte* mine, std::byte* out) {
    for (std::size_t peer = 0; peer < places_.size(); ++peer) inputs_[peer] = places_[peer] + at;
    inputs_[rank_] = mine;
    fold_ranks(op_, dtype_, out, inputs_, bytes / size_of(dtype_));
}

}  // namespace dist_prims
