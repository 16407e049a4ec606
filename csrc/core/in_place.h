// Reductions in memory that all ranks lend: each folds its share over the data of all, and writes the result into all
// of it.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "collectives.h"
#include "held.h"
#include "room.h"

namespace dist_prims {

// The memory of all ranks, mapped here.
struct Lent {
    std::vector<std::shared_ptr<const Mapping>> memory;
    Places places;  // where their data lies in it

    bool empty() const { return places.empty(); }
};

// What the ranks lend in the call whose first phase is over; nothing if some rank lends nothing or cannot reach what
// another lends. The ranks agree on that, once for the same memory.
Lent borrow(Room& room);

class InPlace {
public:
    InPlace(int rank, DType dtype, Op op, const Places& places)
        : rank_(static_cast<std::size_t>(rank)), dtype_(dtype), op_(op), places_(places), each_(places.size()) {}

    // This rank's share of `bytes`, where some is held; past the cache.
    void fold_share(std::size_t bytes, const Held& held);
    void fold_held(const Held::Piece& piece);

private:
    void fold_lent(Range range);
    void fetch(std::size_t begin, std::size_t end) const;
    void fold_block(std::size_t at, std::size_t bytes, const std::byte* mine, std::byte* out);

    const std::size_t rank_;
    const DType dtype_;
    const Op op_;
    const Places& places_;
    std::vector<const void*> each_;
};

}  // namespace dist_prims
