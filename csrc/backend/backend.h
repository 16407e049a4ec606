// The torch.distributed backend "dist_prims": checks, and the collectives of the core behind c10d's interface.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "../core/board.h"
#include "../core/collectives.h"
#include "../core/queue.h"

namespace dist_prims {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Milliseconds = std::chrono::milliseconds;

class PrimsBackend : public c10d::Backend {
public:
    // `engine` serves what is not ours: point-to-point, sparse tensors, and groups that span hosts (`one_host` false).
    PrimsBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Milliseconds timeout,
                 c10::intrusive_ptr<c10d::Backend> engine, bool one_host, std::size_t slot_bytes);
    ~PrimsBackend() override;

    const std::string getBackendName() const override { return "dist_prims"; }
    c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
    void setTimeout(Milliseconds timeout) override;
    void setSequenceNumberForGroup() override {}
    uint64_t getSequenceNumberForGroup() override { return sequence_; }
    void shutdown() override;
    void abort() override { shutdown(); }
    bool native() const { return board_ != nullptr; }

    WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
    WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
    WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
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
    // A collective that is ready to run: told to the others as `call`, done by `run`.
    struct Task {
        Call call;
        std::function<void(Board&)> run;
    };
    struct How {
        c10d::OpType type;
        const char* title;
        Milliseconds timeout;
        bool async;
    };

    template <typename Opts>
    How how(c10d::OpType type, const char* title, const Opts& opts) const;
    WorkPtr perform(std::vector<Task> tasks, const How& how, Tensors outputs);
    void run(std::vector<Task>& tasks, Milliseconds timeout);

    Task all_reduce_task(const at::Tensor& tensor, const c10d::ReduceOp& op) const;
    Task all_gather_task(const Tensors& outputs, const at::Tensor& input) const;
    Task reduce_scatter_task(const at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op) const;
    Task all_to_all_task(const Tensors& outputs, const Tensors& inputs) const;
    Tensors blocks(const at::Tensor& tensor, const std::vector<int64_t>& splits, const char* what) const;
    int root(const char* what, int64_t given) const;

    c10::intrusive_ptr<c10d::Backend> engine_;
    c10::intrusive_ptr<Options> options_;
    const pid_t owner_;
    std::unique_ptr<Board> board_;
    std::shared_ptr<Queue> queue_;
    std::atomic<std::uint64_t> sequence_{0};
};

}  // namespace dist_prims
