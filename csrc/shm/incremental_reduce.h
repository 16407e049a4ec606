// An incremental sum: an all-reduce of shared tensors that begins before all of the data is there, and that waits for
// no rank before its end.
//
// The data comes in pieces. For each piece a rank copies the part that others reduce into its shared tensor, defers its
// own part (see deferred_input.h), and stamps the piece. A rank that finds a piece of its share stamped by all ranks
// reduces it at once: the deferred input is still in the cache, and its memory can be freed soon. When all of the data
// is there, a collective reduces the remaining pieces. The ranks synchronise only in that collective, and only after it
// is the sum complete.
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

#include "deferred_input.h"
#include "host_segment.h"
#include "in_place.h"
#include "stamps.h"

namespace dist_prims {

// A limit on the bytes that several sums defer together. Each deferred piece counts with all the memory that its owner
// keeps.
struct Budget {
    explicit Budget(std::size_t limit) : limit(limit) {}

    const std::size_t limit;
    std::atomic<std::size_t> used{0};
};

// Owners of pieces are destroyed under a lock. The caller must not hold a lock that their destruction needs, such as
// Python's interpreter lock.
class IncrementalReduce {
public:
    // `data` is a shared tensor, which `owner` keeps alive.
    IncrementalReduce(std::byte* data, std::size_t bytes, DType dtype, int rank, int size,
                      std::shared_ptr<Budget> budget, std::shared_ptr<const void> owner);
    // In the middle of a round other ranks may be writing to the data, so it is withdrawn.
    ~IncrementalReduce();
    IncrementalReduce(const IncrementalReduce&) = delete;

    // Adds a piece. Pieces have the same numbers on all ranks. A piece over the budget is copied.
    void put(std::size_t number, const DeferredInput::Piece& piece);

    // Reduces the pieces that all ranks have stamped since.
    void progress();
    // Whether others may have read data of this round; then the round cannot be restarted.
    bool is_published() const;
    // Discards the pieces of this round. They must not have been published.
    void discard();

    // The number of the round, on which the ranks must agree.
    std::uint64_t round() const { return round_; }
    // The collective that completes the sum. The call must have been opened. An error other than a mismatch ends the
    // sum and withdraws the data.
    void finish(HostSegment& host_segment);
    // Instead of finish(): copies all deferred input into the shared tensor.
    void settle();

private:
    struct WaitingPiece {
        std::size_t number;
        DeferredInput::Piece piece;
    };

    void run_collective(HostSegment& host_segment);
    void abandon();
    void publish(const DeferredInput::Piece& piece);
    void fold_ready_pieces();
    DeferredInput take_pieces();
    DeferredInput close_round(const MappedTensors& mapped, Stamps::All stamps);

    const std::shared_ptr<const void> owner_;
    Exporter& exporter_;
    std::byte* const data_;
    const std::size_t bytes_;
    const DType dtype_;
    const int rank_;
    const Range share_;
    const std::shared_ptr<Budget> budget_;
    Stamps stamps_;
    mutable std::mutex mutex_;  // a thread that ends a round may find another one in it
    std::vector<WaitingPiece> waiting_;
    std::vector<Range> done_;
    MappedTensors mapped_;  // known after the first round, as are the stamps
    Stamps::All all_stamps_;
    bool has_put_ = false;
    std::atomic<std::uint64_t> round_{1};
};

}  // namespace dist_prims
