// Deferred input of a reduction in place. Each rank reduces one share of the data, and no other rank reads this rank's
// input of that share. So a rank does not copy this input into its shared tensor: the reduction reads it where it was
// computed, and writes only the result to the shared tensor.
//
//     rank 0's shared tensor   | (deferred) | its part of the rest   |      rank 0 reduces the first share:
//     rank 1's shared tensor   | its part of all, but | (deferred)   |      deferred[0] + shared[1], into both tensors
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "../common/types.h"

namespace dist_prims {

struct Range {
    std::size_t begin = 0, end = 0;

    bool empty() const { return begin >= end; }
    Range within(Range other) const { return {std::max(begin, other.begin), std::min(end, other.end)}; }
};

// The range of `bytes` that a rank reduces. Shares end at cache lines.
Range share_of(std::size_t rank, std::size_t ranks, std::size_t bytes);

class DeferredInput {
public:
    // The input of the range `at` of the shared tensor: `data` times `factor`. `owner` keeps the data alive. Null data:
    // the range holds the result already.
    struct Piece {
        Range at;
        const std::byte* data = nullptr;
        double factor = 1;
        std::shared_ptr<const void> owner = nullptr;

        Piece within(Range range) const;
    };
    // A range of the shared tensor and the piece that belongs there; null where nothing is deferred.
    struct Run {
        Range at;
        const Piece* piece;
    };

    // Pieces must not overlap.
    void add(Piece piece);

    // All runs of a range, in order.
    std::vector<Run> runs(Range range) const;

    // Copies the pieces into the shared tensor, which is `mapped`. No piece may have been reduced yet.
    void copy_pieces(DType dtype, std::byte* mapped) const;

private:
    std::vector<Piece> pieces_;  // in the order of their ranges
};

}  // namespace dist_prims
