// An incremental sum: an all-reduce of shared tensors that begins before all of the data is there, and that waits for
// no rank before its end. A gradient bucket is summed in this way while backward fills it: through IncrementalTensor of
// the adapter for torch, training/incremental_reduce.py adds the gradients and calls the collective that ends the sum.
//
//     piece    a range of the data that is added at once, such as a gradient
//     share    the range of the data that one rank reduces for all ranks
//     stamp    a word in shared memory by which a rank marks that it has added a piece (see stamps.h)
//     round    all that happens for one sum; the next round uses the same shared tensor
//
// 1. put() copies the part of a piece that lies in the shares of other ranks into this rank's shared tensor, and stamps
//    the piece. The part in this rank's own share is deferred: not copied, but kept where it was computed (see
//    deferred_input.h).
// 2. When all ranks have stamped a piece, a rank reduces the part in its share at once: the deferred input is still in
//    the cache, and its memory can be freed soon.
// 3. finish() is a collective. It reduces the rest, and the sum is complete on all ranks after it. The ranks wait for
//    each other only there.
//
//     rank 0   put 0          put 1: reduce its share of 0              finish: reduce its share of 1
//     rank 1          put 0: reduce its share of 0    put 1: reduce its share of 1    finish
//
// Memory order: until finish() the stamps order a piece (stamps.h), from then on the phases of the call (in_place.h).
// Between the threads of a process a mutex orders all but `round_` and the budget, which publish no data.
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

// A limit on the bytes that several sums defer. A piece counts as a whole, because its owner keeps all of its memory.
struct Budget {
    explicit Budget(std::size_t limit) : limit(limit) {}

    const std::size_t limit;
    std::atomic<std::size_t> used{0};
};

// Any thread may call any function. The owners of pieces are destroyed under the lock of this object, so the caller
// must not hold a lock that their destruction needs, such as Python's interpreter lock.
class IncrementalReduce {
public:
    // `data`: a shared tensor of this process, which `owner` keeps alive. `rank`, `size`: among the ranks of this host.
    IncrementalReduce(std::byte* data, std::size_t bytes, DType dtype, int rank, int size,
                      std::shared_ptr<Budget> budget, std::shared_ptr<const void> owner);
    // In the middle of a round other ranks may be writing to the data, so it is withdrawn: see Exporter::withdraw().
    ~IncrementalReduce();
    IncrementalReduce(const IncrementalReduce&) = delete;

    // Adds a piece. A piece has the same number on all ranks. A piece over the budget is copied instead of deferred.
    void put(std::size_t number, const DeferredInput::Piece& piece);

    // Reduces the deferred pieces that all ranks have stamped.
    void progress();
    // Whether other ranks may have read data of this round; then the round cannot be restarted.
    bool is_published() const;
    // Discards the pieces of this round. is_published() must be false.
    void discard();

    // The number of the round, on which the ranks must agree.
    std::uint64_t round() const { return round_; }
    // The collective that completes the sum and ends the round. SlotExchange::open() must have been called for it.
    // After an error other than a mismatch the data is withdrawn, and the sum cannot continue.
    void finish(HostSegment& host_segment);
    // Instead of finish(): copies all deferred input into the shared tensor, for a collective that reads it there.
    void copy_deferred();

private:
    struct DeferredPiece {
        std::size_t number;
        DeferredInput::Piece piece;
    };

    void run_collective(HostSegment& host_segment);
    void withdraw_data();
    void copy_to_shared(const DeferredInput::Piece& piece);
    void fold_ready_pieces();
    DeferredInput take_pieces();
    DeferredInput begin_next_round(const MappedTensors& mapped, Stamps::All stamps);

    const std::shared_ptr<const void> owner_;
    Exporter& exporter_;
    std::byte* const data_;
    const std::size_t bytes_;
    const DType dtype_;
    const int rank_;
    const Range own_share_;
    const std::shared_ptr<Budget> budget_;
    Stamps stamps_;
    mutable std::mutex mutex_;             // of all below
    std::vector<DeferredPiece> deferred_;  // not reduced yet
    std::vector<Range> reduced_;           // ranges of this rank's share that hold the result of this round
    // The tensors and stamps of all ranks, which finish() exchanges: nothing is reduced before the first finish().
    MappedTensors mapped_;
    Stamps::All all_stamps_;
    bool has_put_ = false;  // put() has been called in this round
    std::atomic<std::uint64_t> round_{1};
};

}  // namespace dist_prims
