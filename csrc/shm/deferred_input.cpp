#include "deferred_input.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "../common/kernels.h"
#include "../common/shared_memory.h"

namespace dist_prims {

Range share_of(std::size_t rank, std::size_t ranks, std::size_t bytes) {
    const std::size_t lines = (bytes + kCacheLine - 1) / kCacheLine;
    const auto edge = [&](std::size_t number) { return std::min(number * lines / ranks * kCacheLine, bytes); };
    return {edge(rank), edge(rank + 1)};
}

DeferredInput::Piece DeferredInput::Piece::within(Range range) const {
    Piece piece = *this;
    piece.at = at.within(range);
    if (data && !piece.at.empty()) piece.data += piece.at.begin - at.begin;
    return piece;
}

void DeferredInput::add(Piece piece) {
    const auto later = [](std::size_t begin, const Piece& other) { return begin < other.at.begin; };
    pieces_.insert(std::upper_bound(pieces_.begin(), pieces_.end(), piece.at.begin, later), std::move(piece));
}

std::vector<DeferredInput::Run> DeferredInput::runs(Range range) const {
    std::vector<Run> runs;
    std::size_t done = range.begin;
    for (const Piece& piece : pieces_) {
        const Range at = piece.at.within(range);
        if (at.empty()) continue;
        if (at.begin > done) runs.push_back({{done, at.begin}, nullptr});
        runs.push_back({at, &piece});
        done = at.end;
    }
    if (range.end > done) runs.push_back({{done, range.end}, nullptr});
    return runs;
}

void DeferredInput::copy_pieces(DType dtype, std::byte* mapped) const {
    for (const Piece& piece : pieces_) {
        if (!piece.data) throw std::logic_error("part of the data is summed already, and cannot be sent again");
        scale(dtype, mapped + piece.at.begin, piece.data, piece.factor,
              (piece.at.end - piece.at.begin) / size_of(dtype));
    }
}

}  // namespace dist_prims
