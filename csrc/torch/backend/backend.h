// The torch.distributed backend "dist_prims": checks of arguments, and the collectives of csrc/shm and csrc/net behind
// c10d's interface.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "../../common/flight_recorder.h"
#include "../../common/queue.h"
#include "../../shm/incremental_reduce.h"
#include "execution.h"
#include "group_setup.h"

namespace dist_prims {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A collective by a given schedule. The tensors are listed by block of the data, undefined where this rank has none.
struct ScheduledCall {
    Collective collective;
    std::shared_ptr<const NativeSchedule> schedule;
    Tensors inputs, outputs;
    Counts counts;  // elements of each block
    bool reduces = false;
    c10d::ReduceOp op = c10d::ReduceOp::SUM;
    int root = -1;
    std::function<void()>
        check{};  // called when all ranks are about to make the call; throws where it must not be made
};

class PrimsBackend : public c10d::Backend {
public:
    // `ended` returns a rank of this host that is known from another group to have ended before this group is made, or
    // -1.
    PrimsBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Setup setup,
                 const std::function<int()>& ended);
    ~PrimsBackend() override;
    // Called when the last reference of a user goes while a job or a message keeps the object.
    void release_resources() override { shutdown(); }

    const std::string getBackendName() const override { return "dist_prims"; }
    c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
    void setTimeout(Milliseconds timeout) override;
    void setSequenceNumberForGroup() override {}
    uint64_t getSequenceNumberForGroup() override { return sequence_; }
    void shutdown() override;
    void abort() override { shutdown(); }
    bool spans_hosts() const { return execution_->spans_hosts(); }
    // The ranks of this host whose processes have ended.
    std::vector<int> ended() const { return host_segment_->membership.ended(); }
    std::string engine() const { return setup_.engine ? setup_.engine->getBackendName() : ""; }  // between hosts

    // Pins schedules for the all_reduce of their sizes, and unpins all others.
    void pin(std::vector<NativeSchedule> schedules) { execution_->pin(std::move(schedules)); }
    // The name of the schedule of an all_reduce of this size; empty if the slot exchange of one host does it.
    std::string algorithm(std::uint64_t bytes) {
        const SchedulePtr found = execution_->schedule_for(Collective::kAllReduce, bytes);
        return found ? found->name : "";
    }
    // all_reduce in place, with a shorter path than through torch.distributed.
    void all_reduce_now(at::Tensor tensor, const c10d::ReduceOp& op);
    WorkPtr run_schedule(const ScheduledCall& given, bool async);
    // Whether such a tensor is reduced in place, as a shared tensor.
    bool reduces_in_place(const at::Tensor& tensor) { return tensor.is_cpu() && execution_->reduces_in_place(tensor); }
    // Completes the incremental sum of a tensor.
    WorkPtr all_reduce_incremental(const at::Tensor& tensor, const std::shared_ptr<IncrementalReduce>& incremental,
                                   std::uint64_t number, bool async);
    std::uint64_t next_incremental() { return incrementals_++; }
    // The last calls of this rank, as JSON.
    std::string record() const { return flight_recorder_.json(rank_, setup_.group, "dist_prims", setup_.ranks); }

    bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
    at::Tensor allocateTensor(long size, at::TensorOptions options) override;
    std::shared_ptr<c10::Allocator> getMemAllocator() override { return shared_tensor_allocator(); }
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
    struct CallOptions {
        c10d::OpType type;
        const char* title;
        Milliseconds timeout;
        bool async;
    };

    template <typename Opts>
    CallOptions call_options(c10d::OpType type, const char* title, const Opts& opts) const {
        return {type, title, opts.timeout == c10d::kUnsetTimeout ? options_->timeout : opts.timeout, opts.asyncOp};
    }

    static std::vector<PrimsTask> alone(PrimsTask task) {
        std::vector<PrimsTask> tasks;
        tasks.push_back(std::move(task));
        return tasks;
    }

    // The other backend for these tensors, null if this one serves them.
    c10d::Backend* other(const Tensors& tensors);
    c10d::Backend* elsewhere(const Tensors& tensors, int tag);
    c10d::Backend* gloo();
    void check_owner() const;
    using Taken = std::unique_ptr<Queue, void (*)(Queue*)>;
    Taken take(const char* title, bool wanted);
    c10::weak_intrusive_ptr<PrimsBackend> kept();
    WorkPtr perform(std::vector<PrimsTask> tasks, const CallOptions& options, Tensors outputs);
    static FlightRecorder::Entry entry_of(const Call& call, const CallOptions& options, std::uint64_t sequence);
    void run(std::vector<PrimsTask>& tasks, Milliseconds timeout, std::uint64_t entry);
    template <typename Work>
    void recorded(std::uint64_t entry, const Work& work);
    void write_record() const;
    WorkPtr message(c10d::OpType type, const char* title, Tensors& tensors, int peer, int tag);

    void stop_engine();

    PrimsTask all_reduce_task(const at::Tensor& tensor, const c10d::ReduceOp& op);
    PrimsTask all_reduce_incremental_task(const at::Tensor& tensor,
                                          const std::shared_ptr<IncrementalReduce>& incremental, std::uint64_t number);
    PrimsTask broadcast_task(const at::Tensor& tensor, int root);
    PrimsTask reduce_task(const at::Tensor& tensor, const c10d::ReduceOp& op, int root);
    PrimsTask all_gather_task(const Tensors& outputs, const at::Tensor& input);
    PrimsTask gather_task(const Tensors& outputs, const at::Tensor& input, int root);
    PrimsTask scatter_task(const at::Tensor& output, const Tensors& inputs, int root);
    PrimsTask reduce_scatter_task(const at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op);
    PrimsTask all_to_all_task(const Tensors& outputs, const Tensors& inputs);
    PrimsTask barrier_task();

    Tensors blocks(const at::Tensor& tensor, const std::vector<int64_t>& splits, const char* what) const;
    int root(const char* what, int64_t given) const;

    const Setup setup_;
    c10::intrusive_ptr<Options> options_;
    std::mutex guard_;  // of gloo
    std::atomic<std::thread::id> gloo_maker_{};
    c10::intrusive_ptr<c10d::Backend> gloo_;
    const int owner_;  // the process
    std::shared_ptr<HostSegment> host_segment_;
    std::shared_ptr<Execution> execution_;
    std::shared_ptr<Queue> queue_;
    std::atomic<std::uint64_t> sequence_{0}, messages_{0}, incrementals_{0};
    FlightRecorder flight_recorder_;
};

}  // namespace dist_prims
