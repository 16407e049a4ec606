// A sum in lent memory that begins before all of the data is there, and waits for nobody.
//
// The data comes in pieces. A rank copies what others fold of a piece to where they see it, holds the rest (see
// held.h), and stamps the piece. Whoever finds a piece of its share stamped by all ranks folds it there and then: what
// it holds is still in the cache, and the memory of what it holds is soon free again. What is left when all of the data
// is there is folded by a collective like any other, in which the ranks also meet: only after it is the sum complete.
//
//     rank 0   put 0, stamp          put 1, stamp   fold its share of 0 and 1      finish
//     rank 1           put 0, stamp, fold its share of 0         put 1, stamp      finish: fold its share of 1
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "held.h"
#include "in_place.h"
#include "room.h"

namespace dist_prims {

// How much some sums may hold together, and hold: of each piece all that its owner keeps.
struct Budget {
    explicit Budget(std::size_t limit) : limit(limit) {}

    const std::size_t limit;
    std::atomic<std::size_t> held{0};
};

// Owners of pieces are let go of under a lock: a caller must not hold what they need to go, such as Python's.
class Gradual {
public:
    // `data`: the beginning of lent memory.
    Gradual(std::byte* data, std::size_t bytes, DType dtype, int rank, int size, std::shared_ptr<Budget> budget);

    // A piece comes, by its number on all ranks. What cannot be held is copied.
    void put(std::size_t number, const Held::Piece& piece);

    // Add what has come everywhere since.
    void go_on();
    // Whether others may have seen some of this round: it cannot begin anew.
    bool is_shown() const;
    // What has come in this round does not count. It must not be shown.
    void forget();

    // The round, for the ranks to agree on.
    std::uint64_t round() const { return round_; }
    // The collective. The call must have been opened.
    void finish(Room& room);
    // Instead of it: all that has come is in the lent memory.
    void settle();

private:
    struct Waiting {
        std::size_t number;
        Held::Piece piece;
    };

    void show(const Held::Piece& piece);
    bool is_everywhere(std::size_t number) const;
    void fold_what_is_there();
    Held take();
    Held begin_to_finish(const Lent& lent);

    std::byte* const data_;
    const std::size_t bytes_;
    const DType dtype_;
    const int rank_;
    const Range share_;
    const std::shared_ptr<Budget> budget_;
    mutable std::mutex mutex_;  // who gives up a round may find it under way
    std::vector<Waiting> waiting_;
    std::vector<Range> done_;
    Lent lent_;  // known once a round is over
    bool has_put_ = false;
    std::atomic<std::uint64_t> round_{1};
};

}  // namespace dist_prims
