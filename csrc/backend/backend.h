// The torch.distributed backend "dist_prims": checks, and the collectives of the core behind c10d's interface.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "../core/collectives.h"
#include "../core/plan.h"
#include "../core/queue.h"
#include "../core/record.h"
#include "../core/room.h"
#include "tensors.h"

namespace dist_prims {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Milliseconds = std::chrono::milliseconds;

// What a group is made with.
struct Setup {
    Milliseconds timeout{0};
    // Makes what serves sparse tensors and groups that span hosts. All ranks make it together, and only when it is
    // needed; the word tells this meeting of the ranks from one that has left its keys in the store.
    std::function<c10::intrusive_ptr<c10d::Backend>(std::string word)> make_engine;
    c10::intrusive_ptr<c10d::Backend> accelerator;  // for tensors that are not on the CPU; may be null
    bool one_host = false;
    std::size_t slot_bytes = 0, one_shot_bytes = 0;
    std::string group, ranks;  // for the record
    std::string dump;          // the file to which the record goes when a call fails; may be empty
};

class PrimsBackend : public c10d::Backend {
public:
    PrimsBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Setup setup);
    ~PrimsBackend() override;

    const std::string getBackendName() const override { return "dist_prims"; }
    c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
    void setTimeout(Milliseconds timeout) override;
    void setSequenceNumberForGroup() override {}
    uint64_t getSequenceNumberForGroup() override { return sequence_; }
    void shutdown() override;
    void abort() override { shutdown(); }
    bool native() const { return room_ != nullptr; }

    // all_reduce of `low` to less than `high` bytes goes by this plan.
    void pin(std::uint64_t low, std::uint64_t high, std::string name, Plan plan);
    // all_reduce in place, at once: less is in the way than through torch.distributed.
    void all_reduce_now(at::Tensor tensor, const c10d::ReduceOp& op);
    // The last calls of this rank, as JSON.
    std::string record() const { return record_.json(rank_, setup_.group, "dist_prims", setup_.ranks); }

    bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
    at::Tensor allocateTensor(long size, at::TensorOptions options) override;
    std::shared_ptr<c10::Allocator> getMemAllocator() override;
    bool supportsCoalescing() const override { return setup_.accelerator != nullptr; }
    void startCoalescing() override { setup_.accelerator->startCoalescing(); }
    WorkPtr endCoalescing() override { return setup_.accelerator->endCoalescing(); }

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
        std::function<void(Room&)> run;
    };
    struct How {
        c10d::OpType type;
        const char* title;
        Milliseconds timeout;
        bool async;
    };
    struct Pin {
        std::uint64_t low, high;
        std::string name;
        std::shared_ptr<const Plan> plan;
    };

    template <typename Opts>
    How how(c10d::OpType type, const char* title, const Opts& opts) const {
        return {type, title, opts.timeout == c10d::kUnsetTimeout ? options_->timeout : opts.timeout, opts.asyncOp};
    }

    static std::vector<Task> alone(Task task) {
        std::vector<Task> tasks;
        tasks.push_back(std::move(task));
        return tasks;
    }

    // Who serves these tensors, if not the shared memory.
    c10d::Backend* other(const Tensors& tensors);
    c10d::Backend* engine();
    void check_owner() const;
    using Taken = std::unique_ptr<Queue, void (*)(Queue*)>;
    Taken take(bool wanted);
    WorkPtr perform(std::vector<Task> tasks, const How& how, Tensors outputs);
    static Record::Entry entry_of(const Call& call, const How& how, std::uint64_t sequence);
    void run(std::vector<Task>& tasks, Milliseconds timeout, std::uint64_t entry);
    template <typename Work>
    void recorded(std::uint64_t entry, const Work& work);
    void write_record() const;
    WorkPtr message(c10d::OpType type, const char* title, Tensors& tensors, int peer, int tag);

    Task all_reduce_task(const at::Tensor& tensor, const c10d::ReduceOp& op);
    Task all_gather_task(const Tensors& outputs, const at::Tensor& input) const;
    Task reduce_scatter_task(const at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op) const;
    Task all_to_all_task(const Tensors& outputs, const Tensors& inputs) const;
    Tensors blocks(const at::Tensor& tensor, const std::vector<int64_t>& splits, const char* what) const;
    int root(const char* what, int64_t given) const;

    const Setup setup_;
    c10::intrusive_ptr<Options> options_;
    std::string word_;  // of this meeting of the ranks
    std::mutex guard_;  // of the engine
    c10::intrusive_ptr<c10d::Backend> engine_;
    const int owner_;  // the process
    std::shared_ptr<Room> room_;
    std::shared_ptr<Queue> queue_;
    std::vector<Pin> pins_;
    std::atomic<std::uint64_t> sequence_{0}, messages_{0};
    Mail::Tag planned_ = Mail::Tag{1} << 63;  // tags beyond those of users, one for each planned call
    Record record_;
};

}  // namespace dist_prims
