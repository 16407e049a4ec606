// The torch.distributed backend "dist_prims": one object for each group and rank.
//
// A collective takes this way:
//
//     entry point       entry_points.cpp    checks the arguments, and makes a CollectiveCall of them (CallBuilder)
//     submit()          entry_points.cpp    chooses the schedule (Execution::prepare)
//     run_or_enqueue()  backend.cpp         runs the call on this thread, or gives it to the queue
//     run_calls()       backend.cpp         makes the records of the call, and runs it (Execution::run)
//
// A send or a recv does not pass through the queue: start_message() starts it, and its Work waits for it. A call whose
// tensors are on a CUDA device belongs to NCCL, if torch has it: see other_backend(). Tensors of any other device are
// copied to the CPU before the call and from it after the call, as tensors that are not contiguous are: see packed().
//
// Threads: any thread of the program may make calls, and may end the group (shutdown(), abort()) while calls of other
// threads run; the calls then raise. Jobs of the queue and callbacks of messages keep the object by weak references.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "../../common/exit_action.h"
#include "../../common/flight_recorder.h"
#include "../../common/process.h"
#include "../../common/queue.h"
#include "../../common/trace.h"
#include "../../shm/incremental_reduce.h"
#include "../common/profiler_record.h"
#include "execution.h"
#include "group_setup.h"
#include "lazy_backend.h"

namespace dist_prims {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// How a call is made. A synchronous call (not `async`) is done when the entry point returns.
struct CallOptions {
    c10d::OpType type;
    const char* title;  // the name of the call in errors, profiles and the flight recorder
    Milliseconds timeout;
    bool async;
    std::size_t output_lists = 0;  // the lists into which the future of the call cuts the outputs; 0: it is one list
};

class PrimsBackend : public c10d::Backend {
public:
    using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

    // Meets the other ranks at the store, and returns when all have made the group. `ended` returns a rank of this host
    // whose process has ended, as another group of this process knows, or -1; it is called while the ranks meet.
    PrimsBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Setup setup,
                 const std::function<int()>& ended);
    ~PrimsBackend() override;
    // torch calls it when the user drops the last reference, while a job or a message still keeps the object.
    void release_resources() override { shutdown(); }

    const std::string getBackendName() const override { return options_->backend; }
    // Returns a copy: ProcessGroup::splitGroup of torch 2.13 writes the options of the new group into it.
    c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<Options>(*options_); }
    void setSequenceNumberForGroup() override {}
    uint64_t getSequenceNumberForGroup() override { return sequence_; }
    void setTimeout(Milliseconds timeout) override;
    // Ends the group on this rank, and tells the other ranks. Calls and messages that are not done raise.
    void shutdown() override;
    void abort() override { shutdown(); }
    // Ends the group on all hosts: the calls and messages of other hosts raise at once, those in flight included.
    void end_on_all_hosts() { execution_->end_on_all_hosts(); }
    bool spans_hosts() const { return execution_->spans_hosts(); }
    // The ranks of this host whose processes have ended.
    std::vector<int> ended() const { return host_segment_->membership.ended(); }
    // The ranks that the error of the group names as dead, lost or late.
    std::vector<int> named_ranks() const { return host_segment_->membership.named_ranks(); }
    // Two ranks of which one may be cut off from the others, according to the error; or none.
    std::vector<int> doubtful_ranks() const { return host_segment_->membership.doubtful_ranks(); }
    // The pairs of ranks between whose hosts the link does not deliver, as far as this rank knows.
    std::vector<std::pair<int, int>> cut_links() const { return execution_->cut_links(); }
    // The log of the ranks of this host, which can be used after the group has ended.
    SharedLog& log() { return host_segment_->log; }
    // The transport between hosts; empty on one host.
    std::string transport() const { return setup_->ucx ? "ucx" : setup_->tcp ? "tcp" : setup_->mpi ? "mpi" : ""; }

    // Pins schedules for a collective; see Execution::pin().
    void pin(Collective collective, const std::string& text, MakePins make) {
        execution_->pin(collective, text, std::move(make));
    }
    // The name of the schedule for data of this size; empty if the slot exchange of one host needs none.
    std::string algorithm(std::uint64_t bytes, Collective collective, int root) {
        const SchedulePtr schedule = execution_->schedule_for(collective, bytes, root);
        return schedule ? schedule->name : "";
    }
    // A synchronous all_reduce in place. Bypasses torch's dispatcher, and for a plain tensor also submit().
    void all_reduce_now(const at::Tensor& tensor, const c10d::ReduceOp& op);
    // A call of dist_prims.collectives, whose arguments are checked.
    WorkPtr run_call(CollectiveCall call, bool async);
    CallBuilder builder() const { return {rank_, size_}; }
    // Whether an all_reduce of the tensor works on its own memory, which the other ranks of the host can map.
    bool reduces_in_place(const at::Tensor& tensor) { return tensor.is_cpu() && execution_->reduces_in_place(tensor); }
    // Completes the sum of IncrementalTensor number `number`, whose memory is `tensor`, over all ranks.
    WorkPtr all_reduce_incremental(const at::Tensor& tensor, const std::shared_ptr<IncrementalReduce>& incremental,
                                   std::uint64_t number, bool async);
    std::uint64_t next_incremental() { return incrementals_++; }
    // For tests: sets the next numbers of calls, messages and incremental sums of this group, and of the wait-for
    // graphs of later groups. Every rank must call it, between the same two calls.
    void number_from(std::uint64_t first);
    // The last calls of this rank, as JSON.
    std::string record() const {
        return flight_recorder_.json(rank_, setup_->group, "dist_prims",
                                     c10::str("[", c10::Join(", ", setup_->ranks), "]"));
    }

    bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
    at::Tensor allocateTensor(long size, at::TensorOptions options) override;
    std::shared_ptr<c10::Allocator> getMemAllocator() override { return shared_tensor_allocator(); }
    // Coalescing is for NCCL. torch cannot restrict it to CUDA tensors, so calls of other tensors may come between the
    // two functions: they start at once, and endCoalescing() returns a Work for them, too.
    bool supportsCoalescing() const override { return setup_->nccl != nullptr; }
    void startCoalescing() override;
    WorkPtr endCoalescing() override;

    bool supportsSplitting() const override { return true; }
    // Makes a group of these ranks of this group, in this order. Returns null on the other ranks, which need not call
    // it.
    BackendPtr split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                     const c10::intrusive_ptr<Options>& opts) override;
    // Makes a group with ranks of other groups, which meet at the store.
    BackendPtr merge(const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<Options>& opts,
                     const int& rank, const int& size) override;
    bool supportsShrinking() const override { return true; }
    // Makes a group of the ranks that are not excluded. Each of them must call it; no excluded rank is needed.
    BackendPtr shrink(const std::vector<int64_t>& ranks_to_exclude, int flags,
                      const c10::intrusive_ptr<Options>& opts) override;

#ifdef C10D_BACKEND_HAS_RECONFIGURE
    // Makes this a group without members: its calls raise until the first reconfigure(). Until then torch sees this
    // rank and size.
    void await_members(int rank, int size);
    bool awaits_members() const { return awaits_members_; }
    bool supportsReconfigure() const override { return true; }
    // Names this process to the other members. It remains the same for the life of the object.
    c10d::ReconfigureHandle get_reconfigure_handle() const override;
    // Ends the group, and replaces it by a group of the processes with these handles; see repair/reconfigure.py. No
    // other thread may use the group meanwhile.
    WorkPtr reconfigure(const c10d::ReconfigureOptions& opts) override;
    // Throws if a reconfigure() of this object has used the number.
    void use_uuid(std::int64_t uuid);
#endif

    c10d::ErrorType getError() override;
#ifdef C10D_BACKEND_HAS_HOOKS
    bool supportsAbortHooks() const { return true; }  // overrides a function that torch 2.14 does not have
    void registerAbortHook(int64_t hook_id, c10d::AbortHook hook) override;
    void unregisterAbortHook(int64_t hook_id) override;
#endif
#ifdef C10D_BACKEND_HAS_WINDOW
    bool supportsWindow() const override;
    c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
    // Sends a signal of the window with this number (`type` SEND), or receives one (RECV).
    WorkPtr signal(c10d::OpType type, const char* title, int peer, std::uint64_t window, Milliseconds timeout);
    // The process id of a rank of this host.
    int process_of(int rank) const { return host_segment_->membership.process(rank); }
    // Throws if the group has ended, or if reconfigure() has replaced the group that had this group_number().
    void check_alive(const char* what, std::uint64_t group) const;
    std::uint64_t group_number() const { return group_number_; }
#endif

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
    // Gathers into one tensor. A virtual function of the base since torch 2.15.
    virtual WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts);
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
    WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
    WorkPtr barrier(const c10d::BarrierOptions& opts) override;
    void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
    WorkPtr send(Tensors& tensors, int to, int tag) override;
    WorkPtr recv(Tensors& tensors, int from, int tag) override;
    WorkPtr recvAnysource(Tensors& tensors, int tag) override;

private:
    // Throws in a forked child, and in a group that awaits its members.
    void check_owner() const;
    CallOptions call_options(Collective collective, bool async) const;
    template <typename Opts>
    CallOptions call_options(Collective collective, const Opts& opts, std::optional<c10d::OpType> type = {}) const;
    template <typename In, typename Out>
    ProfiledCall profiled_call(const char* name, const In& inputs, const Out& outputs, int64_t peer) const;
    // The event of a call, for profilers. An input or output is a tensor, a list of tensors, or a list of lists.
    template <typename In, typename Out>
    ProfilerRecord profiler_record(const char* name, bool async, const In& inputs, const Out& outputs,
                                   int64_t root = -1, const std::vector<int64_t>& input_splits = {},
                                   const std::vector<int64_t>& output_splits = {}) const;
    ProfilerRecord message_profiler_record(const char* name, const Tensors& tensors, int peer) const;
    // These two make a call, or the calls of a coalesced collective, as one job. `outputs` are the result of the Work.
    WorkPtr submit(std::vector<CollectiveCall> calls, const CallOptions& options, Tensors outputs);
    WorkPtr submit(CollectiveCall call, const CallOptions& options, Tensors outputs);
    WorkPtr run_or_enqueue(std::vector<CollectiveCall> calls, const CallOptions& options, Tensors outputs);
    // Runs calls whose record in the flight recorder is `entry`, on a thread that has the queue.
    void run_calls(const std::vector<CollectiveCall>& calls, Milliseconds timeout, std::uint64_t entry);
    WorkPtr check_and_start_message(c10d::OpType type, const char* title, const Tensors& tensors, int peer, int tag);
    // Starts a send or a receive of the only tensor. `tag` may be one that users do not have.
    WorkPtr start_message(const CallOptions& options, const Tensors& tensors, int peer, PointToPoint::Tag tag);
    // The backend for the device of these tensors, which must be the same; null if this backend serves it.
    c10d::Backend* other_backend(const Tensors& tensors);
    c10d::Backend* other_backend_for_message(const Tensors& tensors, int tag);
    // Returns the work; endCoalescing() returns it, too, if startCoalescing() has been called before.
    WorkPtr coalesced(WorkPtr work);

    // Reserves the queue for a call that this thread runs, if the queue is idle and `wanted`; otherwise returns null.
    // The destructor of the result ends the reservation.
    using TakenQueue = std::unique_ptr<Queue, void (*)(Queue*)>;
    TakenQueue take_idle_queue(const char* title, bool wanted);
    c10::weak_intrusive_ptr<PrimsBackend> weak_reference();
    // Runs `work`, and notes its end in the flight recorder, in the record number `entry`. On an error it also informs
    // the other hosts, and calls the abort hooks.
    template <typename Work>
    void with_flight_record(std::uint64_t entry, const Work& work);
    void write_record() const;
    void run_abort_hooks() const;
    // At the exit of the process: tells the other ranks that this rank has left, rather than died.
    void leave();
    void take_group_from(PrimsBackend& new_backend);

    const c10::intrusive_ptr<Options> options_;
    const int owner_process_ = this_process();  // its forked children must not use the group
    bool awaits_members_ = false;
    std::atomic<std::uint64_t> sequence_{0}, messages_{0};  // the collectives and the messages so far

    // The group. reconfigure() replaces these.
    std::unique_ptr<const Setup> setup_;
    std::unique_ptr<const TraceGroup> trace_group_;
    std::unique_ptr<LazyBackend> gloo_;
    std::shared_ptr<HostSegment> host_segment_;
    std::shared_ptr<Execution> execution_;
    std::shared_ptr<Queue> queue_;
    std::atomic<std::uint64_t> incrementals_{0}, windows_{0};  // how many have been made

    std::mutex coalesced_guard_;
    std::optional<std::vector<WorkPtr>> coalesced_;  // from startCoalescing() to endCoalescing()

    std::uint64_t group_number_ = 0;  // the number of groups that reconfigure() has made for this object
    std::set<std::int64_t> used_uuids_;
    mutable std::string handle_;  // see get_reconfigure_handle(), which makes it
    FlightRecorder flight_recorder_;
    mutable std::mutex hooks_guard_;
    // By the number of the hook. Shared pointers: to copy a hook of Python's needs the GIL.
    std::map<int64_t, std::shared_ptr<const std::function<void()>>> abort_hooks_;
    std::optional<ExitAction> leave_at_exit_;
};

}  // namespace dist_prims
