// A gradient bucket in shared memory that is summed over the ranks of a host while the backward pass fills it; see
// shm/incremental_reduce.h. Python's training/incremental_reduce.py calls it.
#pragma once

#include "../../shm/incremental_reduce.h"
#include "backend.h"

namespace dist_prims {

class IncrementalTensor {
public:
    // Returns null if the tensor is not in shared memory as a whole.
    //
    // Args:
    //     tensor: receives the sum; of a floating type.
    //     budget: how many bytes of parts may be deferred, that is, copied later; unused if `previous` is given.
    //     previous: an earlier tensor or null. Both have one budget, and each put() here also moves the earlier sum on.
    static std::shared_ptr<IncrementalTensor> make(const c10::intrusive_ptr<PrimsBackend>& backend, at::Tensor tensor,
                                                   std::size_t budget, std::shared_ptr<IncrementalTensor> previous);

    // Adds part * factor to the sum at `view`, a view of this tensor. The piece has the same `number` on all ranks. The
    // part may be read until the sum is done, so it must not be written before. Returns false, and does nothing, if
    // view and part differ in layout.
    bool put(std::size_t number, const at::Tensor& view, const at::Tensor& part, double factor);
    bool is_published() const { return incremental_->is_published(); }
    std::size_t deferred_bytes() const { return budget_->used; }
    void discard() { incremental_->discard(); }

    // Completes the sum on all ranks. Afterwards the tensor is ready for the next round.
    WorkPtr all_reduce(bool async) { return backend_->all_reduce_incremental(tensor_, incremental_, number_, async); }

private:
    IncrementalTensor(const c10::intrusive_ptr<PrimsBackend>& backend, at::Tensor tensor, std::size_t budget,
                      std::shared_ptr<IncrementalTensor> previous);

    const c10::intrusive_ptr<PrimsBackend> backend_;
    const at::Tensor tensor_;
    const std::uint64_t number_;  // the same on all ranks if they make their tensors in one order
    const std::shared_ptr<IncrementalTensor> previous_;
    const std::shared_ptr<Budget> budget_;
    const std::shared_ptr<IncrementalReduce> incremental_;
};

}  // namespace dist_prims
