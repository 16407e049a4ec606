// A torch.distributed backend over the MPI library that mpi4py has loaded.
//
// torch has its own MPI backend, but only if torch was built with an MPI. This one does not need that: it calls MPI
// through the interface of csrc/mpi/library.h. It starts nonblocking operations and polls
// them until they are done, so every wait has a deadline and notices Ctrl-C.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "../../mpi/library.h"
#include "../common/collective_backend.h"

namespace dist_prims::mpi {

// A part of an operation that is ready to begin. Both functions own the memory that MPI works on.
struct MpiTask {
    std::function<void(Calls&)> begin;
    std::function<void()> deliver{};
};

class MpiBackend : public CollectiveBackend<MpiTask> {
public:
    MpiBackend(std::shared_ptr<Group> group, Milliseconds timeout, std::size_t largest_count);
    ~MpiBackend() override { shutdown(); }

    int largest_tag() const { return group_->largest_tag(); }
    void shutdown() override;
    void abort() override;

private:
    MpiTask all_reduce_task(const at::Tensor& input, const at::Tensor& output, Op op) override;
    MpiTask broadcast_task(const at::Tensor& tensor, int root) override;
    MpiTask reduce_task(const at::Tensor& input, const at::Tensor& output, Op op, int root) override;
    MpiTask all_gather_task(const at::Tensor& input, const Tensors& outputs) override;
    MpiTask reduce_scatter_task(const Tensors& inputs, const at::Tensor& output, Op op) override;
    MpiTask all_to_all_task(const Tensors& inputs, const Tensors& outputs) override;
    MpiTask gather_task(const at::Tensor& input, const Tensors& outputs, int root) override;
    MpiTask scatter_task(const Tensors& inputs, const at::Tensor& output, int root) override;
    MpiTask barrier_task() override;
    WorkPtr perform(std::vector<MpiTask> tasks, const CallOptions& options, Tensors outputs) override;
    WorkPtr message(const CallOptions& options, const Tensors& tensor, int peer, int tag) override;
    void monitored_barrier(Milliseconds limit, bool wait_all_ranks) override;
    // `what`: the call, in errors.
    WorkPtr begin(std::vector<MpiTask> tasks, const CallOptions& options, const std::string& what, Tensors outputs);

    const std::shared_ptr<Group> group_;
    const std::size_t largest_count_;
};

}  // namespace dist_prims::mpi

extern template class dist_prims::CollectiveBackend<dist_prims::mpi::MpiTask>;
