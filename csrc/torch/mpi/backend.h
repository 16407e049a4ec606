// A torch.distributed backend over the MPI library that mpi4py has loaded.
//
// torch has its own MPI backend, but only if torch was built with an MPI. This one does not need that: its MPI calls
// are resolved when it is loaded, by the library that is in the process. It starts nonblocking operations and polls
// them until they are done, so every wait has a deadline and notices Ctrl-C.
#pragma once

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "../backend/tensors.h"
#include "calls.h"
#include "group.h"

namespace dist_prims::mpi {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class MpiBackend : public c10d::Backend {
public:
    MpiBackend(std::shared_ptr<Group> group, Milliseconds timeout, std::size_t largest_count);
    ~MpiBackend() override { shutdown(); }

    const std::string getBackendName() const override { return "mpi"; }
    int largest_tag() const { return group_->largest_tag(); }
    c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
    void setTimeout(Milliseconds timeout) override { options_->timeout = timeout; }
    void setSequenceNumberForGroup() override {}
    uint64_t getSequenceNumberForGroup() override { return sequence_; }
    void shutdown() override;
    void abort() override;

    WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
    WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
    WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
    WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
    WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
    WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
    WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& opts) override;
    WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& opts) override;
    WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
    WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override;
    WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                           const c10d::ReduceScatterOptions& opts) override;
    WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::ReduceScatterOptions& opts) override;
    WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::ReduceScatterOptions& opts) override;
    WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                          std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
    WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
    WorkPtr barrier(const c10d::BarrierOptions& opts) override;
    void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
    WorkPtr send(Tensors& tensors, int to, int tag) override;
    WorkPtr recv(Tensors& tensors, int from, int tag) override;
    WorkPtr recvAnysource(Tensors& tensors, int tag) override;

private:
    // A part of an operation that is ready to begin. Both functions own the memory that MPI works on.
    struct MpiTask {
        std::function<void(Calls&)> begin;
        std::function<void()> deliver;
    };
    struct MpiCallOptions {
        c10d::OpType type;
        const char* title;
        Milliseconds timeout;
        bool async;
    };

    template <typename Opts>
    MpiCallOptions call_options(c10d::OpType type, const char* title, const Opts& opts) const {
        return {type, title, opts.timeout == c10d::kUnsetTimeout ? options_->timeout : opts.timeout, opts.asyncOp};
    }
    WorkPtr perform(std::vector<MpiTask> tasks, const MpiCallOptions& call_options, std::string what, Tensors outputs);
    WorkPtr perform(MpiTask task, const MpiCallOptions& call_options, Tensors outputs);
    WorkPtr message(c10d::OpType type, const char* title, Tensors& tensors, int peer, int tag);
    void check_owner() const;
    int root(const char* what, int64_t given) const;

    MpiTask all_reduce_task(const at::Tensor& tensor, const c10d::ReduceOp& op) const;
    MpiTask all_gather_task(const Tensors& outputs, const at::Tensor& input) const;
    MpiTask reduce_scatter_task(const at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op) const;
    MpiTask all_to_all_task(const Tensors& outputs, const Tensors& inputs) const;

    const std::shared_ptr<Group> group_;
    const c10::intrusive_ptr<Options> options_;
    const std::size_t largest_count_;
    const int owner_;  // the process
    std::atomic<std::uint64_t> sequence_{0}, messages_{0};
};

}  // namespace dist_prims::mpi
