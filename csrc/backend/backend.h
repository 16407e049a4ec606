// The torch.distributed backend "dist_prims": checks, and the collectives of the core behind c10d's interface.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "../core/collectives.h"
#include "../core/gradual.h"
#include "../core/plan.h"
#include "../core/queue.h"
#include "../core/record.h"
#include "../core/room.h"
#include "../core/span.h"
#include "tensors.h"

namespace dist_prims {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Milliseconds = std::chrono::milliseconds;

// A schedule for some sizes of a collective, as this rank executes it.
struct Planned {
    std::uint64_t low = 0, high = 0;  // bytes of the data, up to but not including
    std::string name;
    int segments = 1;
    Plan plan;
};

// What a group is made with.
struct Setup {
    Milliseconds timeout{0};
    std::vector<std::string> hosts;            // of each rank, by name
    c10::intrusive_ptr<c10d::Backend> engine;  // what carries messages between hosts; null if there is but one
    // Makes what serves sparse tensors. All ranks make it together, when it is first needed.
    std::function<c10::intrusive_ptr<c10d::Backend>()> make_gloo;
    // The cheapest schedule for a size, where nothing is pinned and the group spans hosts.
    std::function<Planned(const std::string& collective, std::uint64_t bytes, int root)> choose;
    c10::intrusive_ptr<c10d::Backend> accelerator;  // for tensors that are not on the CPU; may be null
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
    bool spans_hosts() const { return span_ != nullptr; }
    std::string engine() const { return setup_.engine ? setup_.engine->getBackendName() : ""; }  // between hosts

    // An all_reduce of their sizes goes by these plans, and by no others that were pinned before.
    void pin(std::vector<Planned> planned);
    // By which schedule an all_reduce of a size goes; empty: by the collectives of one host.
    std::string algorithm(std::uint64_t bytes);
    // all_reduce in place, at once: less is in the way than through torch.distributed.
    void all_reduce_now(at::Tensor tensor, const c10d::ReduceOp& op);
    // Whether such a tensor is reduced in the memory in which it lies, which all ranks lend.
    bool reduces_lent(const at::Tensor& tensor);
    // The sum of a tensor, part of which is there.
    WorkPtr all_reduce_gradual(const at::Tensor& tensor, const std::shared_ptr<Gradual>& gradual, std::uint64_t number,
                               bool async);
    std::uint64_t next_gradual() { return graduals_++; }
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
        std::function<void(Room&)> run;  // in phases of the board, the first of which tells the call
        // Or else: agrees on the call by itself first.
        std::function<void(const Call& call, Milliseconds timeout)> across = {};
    };
    struct How {
        c10d::OpType type;
        const char* title;
        Milliseconds timeout;
        bool async;
    };
    using PlannedPtr = std::shared_ptr<const Planned>;

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
    c10d::Backend* elsewhere(const Tensors& tensors, int tag);
    c10d::Backend* gloo();
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

    void meet(const c10::intrusive_ptr<c10d::Store>& store);
    void stop_engine();

    Task all_reduce_task(const at::Tensor& tensor, const c10d::ReduceOp& op);
    Task all_reduce_gradual_task(const at::Tensor& tensor, const std::shared_ptr<Gradual>& gradual,
                                 std::uint64_t number);
    Task broadcast_task(const at::Tensor& tensor, int root);
    Task reduce_task(const at::Tensor& tensor, const c10d::ReduceOp& op, int root);
    Task all_gather_task(const Tensors& outputs, const at::Tensor& input);
    Task gather_task(const Tensors& outputs, const at::Tensor& input, int root);
    Task scatter_task(const at::Tensor& output, const Tensors& inputs, int root);
    Task reduce_scatter_task(const at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op);
    Task all_to_all_task(const Tensors& outputs, const Tensors& inputs);
    Task barrier_task();

    // Of groups that span hosts, and of pinned schedules: see across.cpp.
    PlannedPtr planned(Collective collective, std::uint64_t bytes, int root = -1);
    void agree(const Call& call, Milliseconds timeout);
    void follow(const Planned& planned, const Call& call, const Field& field, Milliseconds timeout);
    void exchange(const Call& call, const Blocks& in, const Counts& outgoing, const Places& out, const Counts& incoming,
                  Milliseconds timeout);
    void compare_lengths(const Call& call, const Counts& outgoing, const Counts& incoming, Milliseconds timeout);
    Tensors blocks(const at::Tensor& tensor, const std::vector<int64_t>& splits, const char* what) const;
    int root(const char* what, int64_t given) const;

    const Setup setup_;
    c10::intrusive_ptr<Options> options_;
    std::mutex guard_;  // of gloo
    c10::intrusive_ptr<c10d::Backend> gloo_;
    const int owner_;  // the process
    std::shared_ptr<Room> room_;
    std::shared_ptr<Span> span_;    // null: the group is on one host
    std::unique_ptr<Route> route_;  // for plans on one host
    std::shared_ptr<Queue> queue_;
    std::mutex plans_guard_;
    std::vector<PlannedPtr> pins_;
    std::map<std::pair<Collective, int>, std::vector<PlannedPtr>> chosen_;  // by collective and root
    std::atomic<std::uint64_t> sequence_{0}, messages_{0}, graduals_{0};
    Record record_;
};

}  // namespace dist_prims
