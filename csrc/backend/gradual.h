// A tensor of lent memory that is summed as its parts come: see core/gradual.h.
#pragma once

#include "../core/gradual.h"
#include "backend.h"

namespace dist_prims {

class GradualTensor {
public:
    // Null where such a tensor is not reduced in lent memory, all of which it must be. `before`: one that goes on
    // whenever a part of this comes, and shares its budget: so much may be held at a time, in bytes.
    static std::shared_ptr<GradualTensor> make(const c10::intrusive_ptr<PrimsBackend>& backend, at::Tensor tensor,
                                               std::size_t budget, std::shared_ptr<GradualTensor> before);

    // view = part * factor, where `view` is the piece of this tensor with that number, on all ranks alike. What is held
    // of the part must not be written until it is added. False and nothing is done where the two do not lie in memory
    // alike.
    bool put(std::size_t number, const at::Tensor& view, const at::Tensor& part, double factor);
    bool is_shown() const { return gradual_->is_shown(); }
    std::size_t held() const { return budget_->held; }
    void forget() { gradual_->forget(); }

    // Afterwards the tensor is ready for the next round.
    WorkPtr all_reduce(bool async) { return backend_->all_reduce_gradual(tensor_, gradual_, number_, async); }

private:
    GradualTensor(const c10::intrusive_ptr<PrimsBackend>& backend, at::Tensor tensor, std::size_t budget,
                  std::shared_ptr<GradualTensor> before);

    const c10::intrusive_ptr<PrimsBackend> backend_;
    const at::Tensor tensor_;
    const std::uint64_t number_;  // on all ranks alike, where they make them in one order
    const std::shared_ptr<GradualTensor> before_;
    const std::shared_ptr<Budget> budget_;
    const std::shared_ptr<Gradual> gradual_;
};

}  // namespace dist_prims
