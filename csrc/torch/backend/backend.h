// The torch.distributed backend "dist_prims": checks of arguments, and the collectives of csrc/shm and csrc/net behind
// c10d's interface.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "../../common/flight_recorder.h"
#include "../../common/queue.h"
#include "../../net/multi_host.h"
#include "../../net/rank_program.h"
#include "../../shm/collectives.h"
#include "../../shm/host_segment.h"
#include "../../shm/incremental_reduce.h"
#include "creation.h"
#include "tensors.h"

namespace dist_prims {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Milliseconds = std::chrono::milliseconds;

// A schedule for a range of sizes of a collective, as this rank executes it.
struct NativeSchedule {
    std::uint64_t low = 0, high = 0;  // the sizes in bytes: low <= size < high
    std::string name;
    int segments = 1;
    RankProgram program;
};

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

// The parameters of a group.
struct Setup {
    Milliseconds timeout{0};
    std::vector<std::string> hosts;            // by rank: the host's name
    c10::intrusive_ptr<c10d::Backend> engine;  // carries messages between hosts; null on one host
    int largest_tag = 0;                       // of the engine
    // Makes the gloo group for sparse tensors. All ranks make it together, when it is first needed.
    std::function<c10::intrusive_ptr<c10d::Backend>()> make_gloo;
    // Returns the cheapest schedule for a size, for a group that spans hosts and has no pinned schedule.
    std::function<NativeSchedule(const std::string& collective, std::uint64_t bytes, int root)> choose;
    c10::intrusive_ptr<c10d::Backend> accelerator;  // for tensors that are not on the CPU; may be null
    std::size_t slot_bytes = 0, one_shot_bytes = 0;
    std::string group, ranks;  // for the flight recorder
    std::string dump;          // the file to which the flight record is written when a call fails; may be empty
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
    bool spans_hosts() const { return multi_host_ != nullptr; }
    // The ranks of this host whose processes have ended.
    std::vector<int> ended() const { return host_segment_->membership.ended(); }
    std::string engine() const { return setup_.engine ? setup_.engine->getBackendName() : ""; }  // between hosts

    // Pins schedules for the all_reduce of their sizes, and unpins all others.
    void pin(std::vector<NativeSchedule> schedules);
    // The name of the schedule of an all_reduce of this size; empty if the slot exchange of one host does it.
    std::string algorithm(std::uint64_t bytes);
    // all_reduce in place, with a shorter path than through torch.distributed.
    void all_reduce_now(at::Tensor tensor, const c10d::ReduceOp& op);
    WorkPtr run_schedule(const ScheduledCall& given, bool async);
    // Whether such a tensor is reduced in place, as a shared tensor.
    bool reduces_in_place(const at::Tensor& tensor);
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
    // A collective that is ready to run: announced to the other ranks as `call`, executed by `run`.
    struct Task {
        Call call;
        std::function<void(HostSegment&)> run;  // in phases, the first of which announces the call
        // Alternatively, by a schedule: agrees on the call by itself first.
        std::function<void(const Call& call, Milliseconds timeout)> run_scheduled = {};
    };
    struct CallOptions {
        c10d::OpType type;
        const char* title;
        Milliseconds timeout;
        bool async;
    };
    using SchedulePtr = std::shared_ptr<const NativeSchedule>;

    template <typename Opts>
    CallOptions call_options(c10d::OpType type, const char* title, const Opts& opts) const {
        return {type, title, opts.timeout == c10d::kUnsetTimeout ? options_->timeout : opts.timeout, opts.asyncOp};
    }

    static std::vector<Task> alone(Task task) {
        std::vector<Task> tasks;
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
    WorkPtr perform(std::vector<Task> tasks, const CallOptions& options, Tensors outputs);
    static FlightRecorder::Entry entry_of(const Call& call, const CallOptions& options, std::uint64_t sequence);
    void run(std::vector<Task>& tasks, Milliseconds timeout, std::uint64_t entry);
    template <typename Work>
    void recorded(std::uint64_t entry, const Work& work);
    void write_record() const;
    WorkPtr message(c10d::OpType type, const char* title, Tensors& tensors, int peer, int tag);

    void rendezvous(const c10::intrusive_ptr<c10d::Store>& store, const GroupCreation& creation,
                    const std::function<int()>& ended);
    void stop_engine();

    // The shared-tensor reference of these bytes; empty if an all_reduce of so few bytes does not work in place.
    SharedTensorRef tensor_ref_of(const std::byte* data, std::size_t bytes) const;

    Task all_reduce_task(const at::Tensor& tensor, const c10d::ReduceOp& op);
    Task all_reduce_incremental_task(const at::Tensor& tensor, const std::shared_ptr<IncrementalReduce>& incremental,
                                     std::uint64_t number);
    Task broadcast_task(const at::Tensor& tensor, int root);
    Task reduce_task(const at::Tensor& tensor, const c10d::ReduceOp& op, int root);
    Task all_gather_task(const Tensors& outputs, const at::Tensor& input);
    Task gather_task(const Tensors& outputs, const at::Tensor& input, int root);
    Task scatter_task(const at::Tensor& output, const Tensors& inputs, int root);
    Task reduce_scatter_task(const at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op);
    Task all_to_all_task(const Tensors& outputs, const Tensors& inputs);
    Task barrier_task();

    // For groups that span hosts and for pinned schedules; see multi_host.cpp.
    SchedulePtr schedule_for(Collective collective, std::uint64_t bytes, int root = -1);
    SchedulePtr known_schedule(Collective collective, std::uint64_t bytes, int root);
    void agree(const Call& call, Milliseconds timeout);
    // `data` holds the elements of the call; `blocks`: see ProgramBuffer.
    void execute_schedule(const NativeSchedule& schedule, const Call& call, const at::Tensor& data,
                          Milliseconds timeout, const Counts& blocks = {});
    void execute_schedule_on_blocks(const NativeSchedule& schedule, const Call& call, const Tensors& inputs,
                                    const Tensors& outputs, const Counts& counts, Milliseconds timeout);
    void exchange(const Call& call, const Blocks& in, const Counts& outgoing, const Places& out, const Counts& incoming,
                  Milliseconds timeout, const Transport::Owner& owner);
    [[noreturn]] void give_up_monitored_barrier(const std::vector<int>& late, Milliseconds limit);
    void monitored_barrier_multi_host(const c10d::BarrierOptions& opts, bool wait_all_ranks);
    void compare_lengths(const Call& call, const Counts& outgoing, const Counts& incoming, Milliseconds timeout);
    Tensors blocks(const at::Tensor& tensor, const std::vector<int64_t>& splits, const char* what) const;
    int root(const char* what, int64_t given) const;

    const Setup setup_;
    c10::intrusive_ptr<Options> options_;
    std::mutex guard_;  // of gloo
    std::atomic<std::thread::id> gloo_maker_{};
    c10::intrusive_ptr<c10d::Backend> gloo_;
    const int owner_;  // the process
    std::shared_ptr<HostSegment> host_segment_;
    std::shared_ptr<MultiHostGroup> multi_host_;  // null: the group is on one host
    std::unique_ptr<Router> router_;              // for schedules on one host
    std::shared_ptr<Queue> queue_;
    std::mutex schedules_guard_;
    std::vector<SchedulePtr> pins_;
    std::map<std::pair<Collective, int>, std::vector<SchedulePtr>> chosen_;  // by collective and root
    std::atomic<std::uint64_t> sequence_{0}, messages_{0}, incrementals_{0};
    FlightRecorder flight_recorder_;
};

}  // namespace dist_prims
