// Data that a rank holds back. In a reduction in lent memory (see lending.h) each rank folds one share of the data; its
// own part of that share nobody else reads. So it need not be in the lent memory at all: it is taken from where it was
// made, and only the sum is written.
//
//     rank 0's lent memory   | (held)  | its part of the rest |       rank 0 folds the first share:
//     rank 1's lent memory   | its part of all, but | (held)  |       held[0] + lent[1], into both memories
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "types.h"

namespace dist_prims {

struct Range {
    std::size_t begin = 0, end = 0;

    bool empty() const { return begin >= end; }
    Range within(Range other) const;  // what both have
};

// The bytes that a rank folds, of `bytes` in all. Shares end where cache lines do.
Range share_of(std::size_t rank, std::size_t ranks, std::size_t bytes);

class Held {
public:
    // What belongs `at` these bytes of the lent memory: `data` times `factor`. Where there is no data the sum is there
    // already.
    struct Piece {
        Range at;
        const std::byte* data = nullptr;
        double factor = 1;
        std::shared_ptr<const void> owner = nullptr;

        Piece within(Range range) const;
    };
    // A stretch of the lent memory, and the piece that belongs there; null where nothing is held.
    struct Run {
        Range at;
        const Piece* piece;
    };

    // Pieces must not overlap.
    void add(Piece piece);

    // All of a stretch, in order.
    std::vector<Run> runs(Range of) const;

    // Bring the pieces to where they belong after all. There must be no sums yet.
    void settle(DType dtype, std::byte* lent) const;

private:
    std::vector<Piece> pieces_;  // in order
};

}  // namespace dist_prims
