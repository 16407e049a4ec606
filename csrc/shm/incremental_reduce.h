// An incremental sum: an all-reduce of shared tensors that begins before all of the data is there, and that waits for
// no rank before its end.
//
// The data comes in pieces. For each piece a rank copies the part that others reduce into its shared tensor, defers its
// own part (see deferred_input.h), and stamps the piece (stamps.h). When all ranks have stamped a piece, a rank may
// reduce its share of it at once: the deferred input is still in the cache, and its memory can be freed soon. When all
// of the data is there, a collective reduces the remaining pieces; it ends a round. The ranks synchronise only in that
// collective, and the sum is complete after it. The next round uses the same tensor.
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

// A limit on the bytes that several sums defer together. A deferred piece counts as a whole, because its owner keeps
// all of its memory.
struct Budget {
    explicit Budget(std::size_t limit) : limit(limit) {}

    const std::size_t limit;
    std::atomic<std::size_t> used{0};
};

// Any thread may call any function. Owners of pieces are destroyed under a lock of this object, so the caller must not
// hold a lock that their destruction needs, such as Python's interpreter lock.
class IncrementalReduce {
public:
    // `data` is a shared tensor, which `owner` keeps alive.
    IncrementalReduce(std::byte* data, std::size_t bytes, DType dtype, int rank, int size,
                      std::shared_ptr<Budget> budget, std::shared_ptr<const void> owner);
    // In the middle of a round other ranks may be writing to the data, so it is withdrawn.
    ~IncrementalReduce();
    IncrementalReduce(const IncrementalReduce&) = delete;

    // Adds a piece. Pieces have the same numbers on all ranks. A piece over the budget is copied instead of deferred.
    void put(std::size_t number, const DeferredInput::Piece& piece);

    // Reduces the waiting pieces that all ranks have stamped.
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
    mutable std::mutex mutex_;           // of all below
    std::vector<WaitingPiece> waiting_;  // deferred parts of this rank's share, not reduced yet
    std::vector<Range> done_;            // ranges of this rank's share that hold the result
    MappedTensors mapped_;               // empty before the end of the first round, as are the stamps
    Stamps::All all_stamps_;
    bool has_put_ = false;  // in this round
    std::atomic<std::uint64_t> round_{1};
};

}  // namespace dist_prims
