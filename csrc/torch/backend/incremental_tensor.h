// A shared tensor that is summed as its parts are computed; see shm/incremental_reduce.h.
#pragma once

#include "../../shm/incremental_reduce.h"
#include "backend.h"

namespace dist_prims {

class IncrementalTensor {
public:
    // Returns null if the tensor is not reduced in place, which requires that all of it is shared. `previous` is an
    // earlier tensor: each part of this one also lets the earlier one progress, and both share `budget`, the bytes that
    // may be deferred.
    static std::shared_ptr<IncrementalTensor> make(const c10::intrusive_ptr<PrimsBackend>& backend, at::Tensor tensor,
                                                   std::size_t budget, std::shared_ptr<IncrementalTensor> previous);

    // Adds view = part * factor, where `view` is the piece of this tensor with that number, which is the same on all
    // ranks. A deferred part must not be written until it is added. Returns false, and does nothing, if the two differ
    // in layout.
    bool put(std::size_t number, const at::Tensor& view, const at::Tensor& part, double factor);
    bool is_published() const { return incremental_->is_published(); }
    std::size_t deferred_bytes() const { return budget_->used; }
    void discard() { incremental_->discard(); }

    // Completes the sum. Afterwards the tensor is ready for the next round.
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
