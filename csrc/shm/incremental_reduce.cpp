#include "incremental_reduce.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "../common/kernels.h"
#include "../common/streaming.h"
#include "../common/trace.h"
#include "collectives.h"

namespace dist_prims {

IncrementalReduce::IncrementalReduce(std::byte* data, std::size_t bytes, DType dtype, int rank, int size,
                                     std::shared_ptr<Budget> budget, std::shared_ptr<const void> owner)
    : owner_(std::move(owner)),
      exporter_(Exporter::instance()),
      data_(data),
      bytes_(bytes),
      dtype_(dtype),
      rank_(rank),
      own_share_(share_of(static_cast<std::size_t>(rank), static_cast<std::size_t>(size), bytes)),
      budget_(std::move(budget)) {}

IncrementalReduce::~IncrementalReduce() {
    if (!exporter_.is_of_this_process()) return;  // in a forked child another thread may have had the lock
    try {
        if (is_published()) withdraw_data();
    } catch (const std::system_error&) {  // a destructor cannot report it
    }
}

void IncrementalReduce::put(std::size_t number, const DeferredInput::Piece& piece) {
    const std::lock_guard lock(mutex_);
    // 1. Copy the parts in front of and behind the deferred part, which is empty if the budget is used up.
    const std::size_t bytes = piece.at.end - piece.at.begin;
    DeferredInput::Piece own = piece.within(own_share_);
    const bool defers = !own.at.empty() && budget_->used + bytes <= budget_->limit;
    const Range deferred = defers ? own.at : Range{piece.at.end, piece.at.end};
    for (const Range part : {Range{piece.at.begin, deferred.begin}, Range{deferred.end, piece.at.end}}) {
        if (!part.empty()) copy_to_shared(piece.within(part));
    }
    // 2. Stamp the piece: from now on the other ranks may reduce the parts in their shares.
    stamps_.set(number, round_);
    has_put_ = true;
    // 3. Keep the deferred part. When it is destroyed, its owner gives the budget back and frees the piece.
    if (defers) {
        budget_->used += bytes;
        own.owner = {piece.data, [owner = piece.owner, budget = budget_, bytes](auto) { budget->used -= bytes; }};
        deferred_.push_back({number, std::move(own)});
    }
    fold_ready_pieces();
}

void IncrementalReduce::progress() {
    const std::lock_guard lock(mutex_);
    fold_ready_pieces();
}

// Writes a part, times its factor, into the shared tensor. A large part is written past the cache, because only other
// ranks read it; for a small part that takes longer than it saves.
void IncrementalReduce::copy_to_shared(const DeferredInput::Piece& piece) {
    constexpr std::size_t kSmall = 64 * 1024;
    const std::size_t bytes = piece.at.end - piece.at.begin;
    if (bytes < kSmall) return scale(dtype_, data_ + piece.at.begin, piece.data, piece.factor, bytes / size_of(dtype_));
    alignas(64) std::byte block[4 * 1024];
    for (std::size_t at = 0; at < bytes; at += sizeof block) {
        const std::size_t length = std::min(sizeof block, bytes - at);
        scale(dtype_, block, piece.data + at, piece.factor, length / size_of(dtype_));
        copy_past_cache(data_ + piece.at.begin + at, block, length);
    }
    end_past_cache();
}

void IncrementalReduce::fold_ready_pieces() {
    if (mapped_.empty() || deferred_.empty()) return;
    InPlace in_place(rank_, dtype_, Op::kSum, mapped_.places);
    const TraceSpan span(TraceKind::kReduce);
    std::erase_if(deferred_, [&](const DeferredPiece& deferred) {
        if (!all_stamps_.are_set(deferred.number, round_)) return false;
        in_place.fold_deferred(deferred.piece);
        reduced_.push_back(deferred.piece.at);
        return true;
    });
    end_past_cache();
}

bool IncrementalReduce::is_published() const {
    const std::lock_guard lock(mutex_);
    return has_put_ && !mapped_.empty();
}

void IncrementalReduce::discard() {
    const std::lock_guard lock(mutex_);
    take_pieces();
}

// Removes and returns the pieces of this round: with data if they are not reduced yet.
DeferredInput IncrementalReduce::take_pieces() {
    DeferredInput pieces;
    for (DeferredPiece& deferred : deferred_) pieces.add(std::move(deferred.piece));
    for (const Range& range : reduced_) pieces.add({range});
    deferred_.clear();
    reduced_.clear();
    has_put_ = false;
    return pieces;
}

void IncrementalReduce::finish(HostSegment& host_segment) {
    undo_on_failure([&] { run_collective(host_segment); }, [this] { withdraw_data(); });
}

void IncrementalReduce::run_collective(HostSegment& host_segment) {
    // 1. The first phase compares the calls of all ranks, of which the round is a part, and tells where the stamps are.
    stamps_.announce(host_segment.slots);
    host_segment.slots.phase();
    const auto announced = Stamps::announced(host_segment.slots);
    // 2. Map all tensors and stamps, or none if some rank cannot. Take the pieces: no other thread reduces them then.
    MappedTensors mapped = map_tensors(host_segment, tensor_refs_of(host_segment.slots), data_);
    Stamps::All stamps = mapped.empty() ? Stamps::All{} : stamps_.map_tensors(host_segment, announced);
    if (stamps.mapped.empty()) mapped = {};
    const DeferredInput pieces = begin_next_round(mapped, std::move(stamps));
    // 3. Reduce what is not reduced yet: in the mapped tensors, or through the slots if there are none.
    if (mapped.empty()) {
        pieces.copy_pieces(dtype_, data_);
        all_reduce_by_slots(host_segment.slots, dtype_, Op::kSum, data_, data_, bytes_ / size_of(dtype_));
    } else {
        InPlace(rank_, dtype_, Op::kSum, mapped.places).fold_share(bytes_, pieces);
        finish_in_place(host_segment, data_, bytes_);
    }
}

// Ends the sum after a failure: no rank writes to the data of another rank after this.
void IncrementalReduce::withdraw_data() {
    const std::lock_guard lock(mutex_);
    take_pieces();
    mapped_ = {};
    exporter_.withdraw(data_, bytes_);
}

// Begins the next round, and returns the pieces of the last. All ranks know the same mappings, so all or none throw.
DeferredInput IncrementalReduce::begin_next_round(const MappedTensors& mapped, Stamps::All stamps) {
    const std::lock_guard lock(mutex_);
    if (!mapped_.empty() && mapped.places != mapped_.places) {
        throw std::runtime_error("rank " + std::to_string(rank_) +
                                 ": this sum cannot continue, because another collective on the same tensor has failed "
                                 "on some rank; start a new sum on another tensor");
    }
    mapped_ = mapped;
    all_stamps_ = std::move(stamps);
    ++round_;
    return take_pieces();
}

void IncrementalReduce::copy_deferred() {
    const std::lock_guard lock(mutex_);
    take_pieces().copy_pieces(dtype_, data_);
}

}  // namespace dist_prims
