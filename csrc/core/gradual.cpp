#include "gradual.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "collectives.h"
#include "kernels.h"
#include "streaming.h"

namespace dist_prims {

Gradual::Gradual(std::byte* data, std::size_t bytes, DType dtype, int rank, int size, std::shared_ptr<Budget> budget)
    : data_(data),
      bytes_(bytes),
      dtype_(dtype),
      rank_(rank),
      share_(share_of(static_cast<std::size_t>(rank), static_cast<std::size_t>(size), bytes)),
      budget_(std::move(budget)) {}

void Gradual::put(std::size_t number, const Held::Piece& piece) {
    const std::lock_guard lock(mutex_);
    const std::size_t bytes = piece.at.end - piece.at.begin;
    Held::Piece own = piece.within(share_);
    const bool holds = !own.at.empty() && budget_->held + bytes <= budget_->limit;
    const Range kept = holds ? own.at : Range{piece.at.end, piece.at.end};
    for (const Range part : {Range{piece.at.begin, kept.begin}, Range{kept.end, piece.at.end}}) {
        if (!part.empty()) show(piece.within(part));
    }
    if (number < LentHead::kStamps) head_of(data_).stamps[number].store(round_, std::memory_order_release);
    has_put_ = true;
    if (holds) {
        budget_->held += bytes;
        own.owner = {piece.data, [owner = piece.owner, budget = budget_, bytes](auto) { budget->held -= bytes; }};
        waiting_.push_back({number, std::move(own)});
    }
    fold_what_is_there();
}

void Gradual::go_on() {
    const std::lock_guard lock(mutex_);
    fold_what_is_there();
}

// A large part leaves the cache before others read it; to see it off takes longer than a small one is worth.
void Gradual::show(const Held::Piece& piece) {
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

void Gradual::fold_what_is_there() {
    if (lent_.empty() || waiting_.empty()) return;
    InPlace in_place(rank_, dtype_, Op::kSum, lent_.places);
    std::erase_if(waiting_, [&](const Waiting& each) {
        if (!is_everywhere(each.number)) return false;
        in_place.fold_held(each.piece);
        done_.push_back(each.piece.at);
        return true;
    });
    end_past_cache();
}

bool Gradual::is_everywhere(std::size_t number) const {
    return number < LentHead::kStamps &&
           std::all_of(
               lent_.places.begin(), lent_.places.end(),
               [&](std::byte* place) {
                   return head_of(place).stamps[number].load(std::memory_order_acquire) == round_;
               });
}

bool Gradual::is_shown() const {
    const std::lock_guard lock(mutex_);
    return has_put_ && !lent_.empty();
}

void Gradual::forget() {
    const std::lock_guard lock(mutex_);
    take();
}

Held Gradual::take() {
    Held held;
    for (Waiting& each : waiting_) held.add(std::move(each.piece));
    for (const Range& each : done_) held.add({each});
    waiting_.clear();
    done_.clear();
    has_put_ = false;
    return held;
}

// The first phase tells whether all ranks are in the same round. If they are not, it is as if nobody had called.
void Gradual::finish(Room& room) {
    room.board.phase();
    const Lent lent = borrow(room);
    const Held held = begin_to_finish(lent);
    if (lent.empty()) {
        held.settle(dtype_, data_);
        all_reduce_by_slots(room.board, dtype_, Op::kSum, data_, data_, bytes_ / size_of(dtype_));
    } else {
        InPlace(rank_, dtype_, Op::kSum, lent.places).fold_share(bytes_, held);
        room.board.phase();
    }
}

Held Gradual::begin_to_finish(const Lent& lent) {
    const std::lock_guard lock(mutex_);
    if (!done_.empty() && lent.places != lent_.places)
        throw std::logic_error("rank " + std::to_string(rank_) + ": another rank sums in other memory than before");
    lent_ = lent;
    ++round_;
    return take();
}

void Gradual::settle() {
    const std::lock_guard lock(mutex_);
    take().settle(dtype_, data_);
}

}  // namespace dist_prims
