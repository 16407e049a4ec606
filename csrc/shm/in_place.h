// Reductions in place, in shared tensors of all ranks: each rank reduces its share of the data of all ranks, and writes
// the result into all tensors.
//
// Memory order: the first and the last phase of the call order all accesses (slot_exchange.h). A rank has written its
// own data before the first phase. Between the two phases only one rank, the owner of the share, accesses a byte of
// any tensor. Copies past the cache are ended before the last phase, after which each rank has the whole result.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "collectives.h"
#include "deferred_input.h"
#include "host_segment.h"

namespace dist_prims {

// The tensors of all ranks, mapped in this process.
struct MappedTensors {
    std::vector<std::shared_ptr<const Mapping>> memory;
    Places places;  // the data, by rank

    bool empty() const { return places.empty(); }
};

// The tensor of each rank in the current call. Valid after the call's first phase.
std::vector<SharedTensorRef> tensor_refs_of(const SlotExchange& slots);
// Maps one tensor of each rank. All ranks must call it with the same list, in the same phase. `mine`: the address of
// this rank's tensor. The result is empty on all ranks if some tensor is not shared or some rank cannot map a tensor.
// The ranks agree on that in a phase of its own, unless they have agreed on the same arenas before.
MappedTensors map_tensors(HostSegment& host_segment, const std::vector<SharedTensorRef>& tensor_refs, std::byte* mine);

// The last phase of a call in place. After it no other rank reads or writes this rank's `data`. Throws if another rank
// has failed in the call: that rank has withdrawn its memory, so what was read there may not be its data.
void finish_in_place(HostSegment& host_segment, const std::byte* data, std::size_t bytes);

// Returns the result of `work`. If it throws, `undo` comes first; except after a Mismatch: no rank has begun to write.
template <typename Work, typename Undo>
auto undo_on_failure(const Work& work, const Undo& undo) {
    try {
        return work();
    } catch (const CommError& error) {
        if (error.kind != CommError::Kind::kMismatch) undo();
        throw;
    } catch (...) {
        undo();
        throw;
    }
}

// Returns the result of `work`, during which other ranks may write to this rank's `data`; a failure withdraws the data.
template <typename Work>
auto in_shared_memory(const std::byte* data, std::size_t bytes, const Work& work) {
    return undo_on_failure(work, [&] { Exporter::instance().withdraw(data, bytes); });
}

// Reduces parts of this rank's share, in the tensors of all ranks. `places` must outlive the object.
class InPlace {
public:
    InPlace(int rank, DType dtype, Op op, const Places& places)
        : rank_(static_cast<std::size_t>(rank)), dtype_(dtype), op_(op), places_(places), inputs_(places.size()) {}

    // Reduces this rank's whole share of `bytes`, except for pieces that hold the result already. A large share is
    // divided among threads.
    void fold_share(std::size_t bytes, const DeferredInput& deferred);
    // Reduces a deferred piece. The caller must call end_past_cache() before it publishes the result.
    void fold_deferred(const DeferredInput::Piece& piece);

private:
    void fold_range(Range range, const DeferredInput& deferred);
    void fold_shared(Range range);
    void fetch(std::size_t begin, std::size_t end) const;
    void fold_block(std::size_t at, std::size_t bytes, const std::byte* mine, std::byte* out);

    const std::size_t rank_;
    const DType dtype_;
    const Op op_;
    const Places& places_;
    std::vector<const void*> inputs_;  // of the current block, by rank
};

}  // namespace dist_prims
