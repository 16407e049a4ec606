// The torch.distributed backend "dist_prims": describes each collective as a Call, and runs its task in the queue.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "../../common/exit_action.h"
#include "../../common/flight_recorder.h"
#include "../../common/queue.h"
#include "../../common/trace.h"
#include "../../shm/incremental_reduce.h"
#include "../common/collective_backend.h"
#include "execution.h"
#include "group_setup.h"
#include "lazy_backend.h"

namespace dist_prims {

// A collective by a given schedule. The tensors are listed by block of the data, undefined where this rank has none.
struct ScheduledCall {
    Collective collective;
    std::shared_ptr<const NativeSchedule> schedule;
    Tensors inputs, outputs;
    Counts counts;  // elements of each block
    bool reduces = false;
    c10d::ReduceOp op = c10d::ReduceOp::SUM;
    int root = -1;
    bool is_even = true;  // whether all ranks that make this call have blocks of one length
    std::function<void()>
        check{};  // called when all ranks are about to make the call; throws where it must not be made
};

class PrimsBackend : public CollectiveBackend<PrimsTask> {
public:
    using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

    // `ended` returns a rank of this host that is known from another group to have ended before this group is made, or
    // -1.
    PrimsBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Setup setup,
                 const std::function<int()>& ended);
    ~PrimsBackend() override;
    // Called when the last reference of a user goes while a job or a message keeps the object.
    void release_resources() override { shutdown(); }

    void setTimeout(Milliseconds timeout) override;
    void shutdown() override;
    void abort() override { shutdown(); }
    bool spans_hosts() const { return execution_->spans_hosts(); }
    // The ranks of this host whose processes have ended.
    std::vector<int> ended() const { return host_segment_->membership.ended(); }
    // The ranks that the error of the group names as dead, lost or late.
    std::vector<int> named_ranks() const { return host_segment_->membership.named_ranks(); }
    // The log of the ranks of this host, which can be used after the group has ended.
    SharedLog& log() { return host_segment_->log; }
    std::string engine() const {
        return setup_->ucx ? "ucx" : setup_->tcp ? "tcp" : setup_->mpi ? "mpi" : "";
    }  // between hosts

    // Pins schedules for a collective; see Execution::pin().
    void pin(Collective collective, const std::string& text, MakePins make) {
        execution_->pin(collective, text, std::move(make));
    }
    // The name of the schedule for data of this size; empty if the slot exchange of one host needs none.
    std::string algorithm(std::uint64_t bytes, Collective collective, int root) {
        const SchedulePtr found = execution_->schedule_for(collective, bytes, root);
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
    // For tests: where the numbers of calls, messages and incremental sums of this group go on, and those of the graphs
    // of later groups. On all ranks, between two calls.
    void number_from(std::uint64_t first);
    // The last calls of this rank, as JSON.
    std::string record() const {
        return flight_recorder_.json(rank_, setup_->group, "dist_prims",
                                     c10::str("[", c10::Join(", ", setup_->ranks), "]"));
    }

    bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
    at::Tensor allocateTensor(long size, at::TensorOptions options) override;
    std::shared_ptr<c10::Allocator> getMemAllocator() override { return shared_tensor_allocator(); }
    bool supportsCoalescing() const override { return setup_->accelerator != nullptr; }
    void startCoalescing() override { setup_->accelerator->startCoalescing(); }
    WorkPtr endCoalescing() override { return setup_->accelerator->endCoalescing(); }

    bool supportsSplitting() const override { return true; }
    // The group of these ranks of this one, in this order; null on the other ranks, which need not call it.
    BackendPtr split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                     const c10::intrusive_ptr<Options>& opts) override;
    // A group with ranks of other groups, which meet at the store.
    BackendPtr merge(const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<Options>& opts,
                     const int& rank, const int& size) override;
    bool supportsShrinking() const override { return true; }
    // The group of the ranks that are not excluded, each of which makes this call. Needs none of the excluded ranks.
    BackendPtr shrink(const std::vector<int64_t>& ranks_to_exclude, int flags,
                      const c10::intrusive_ptr<Options>& opts) override;

#ifdef C10D_BACKEND_HAS_RECONFIGURE
    // The group has no members until the first reconfigure(): its calls raise. Until then it has this rank and size.
    void await_members(int rank, int size);
    bool awaits_members() const { return awaits_members_; }
    bool supportsReconfigure() const override { return true; }
    // Names this process to the other members. It remains the same for the life of the object.
    c10d::ReconfigureHandle get_reconfigure_handle() const override;
    // Ends the group, and makes one of the processes of these handles in its place; see repair/reconfigure.py. No other
    // thread may use the group meanwhile.
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
    // A signal of a window, or the wait for one.
    WorkPtr signal(c10d::OpType type, const char* title, int peer, std::uint64_t window, Milliseconds timeout);
    int process_of(int rank) const { return host_segment_->membership.process(rank); }
    // Throws if the group has ended, or if reconfigure() has replaced the group with this number.
    void check_alive(const char* what, std::uint64_t group) const;
    std::uint64_t group_number() const { return reconfigured_; }
#endif

    WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
    WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
    WorkPtr barrier(const c10d::BarrierOptions& opts) override;

private:
    PrimsTask exchange_task(const ScheduledCall& given, Call call);
    PrimsTask all_reduce_task(const at::Tensor& input, const at::Tensor& output, Op op) override;
    PrimsTask broadcast_task(const at::Tensor& tensor, int root) override;
    PrimsTask reduce_task(const at::Tensor& input, const at::Tensor& output, Op op, int root) override;
    PrimsTask all_gather_task(const at::Tensor& input, const Tensors& outputs) override;
    PrimsTask reduce_scatter_task(const Tensors& inputs, const at::Tensor& output, Op op) override;
    PrimsTask all_to_all_task(const Tensors& inputs, const Tensors& outputs) override;
    PrimsTask gather_task(const at::Tensor& input, const Tensors& outputs, int root) override;
    PrimsTask scatter_task(const Tensors& inputs, const at::Tensor& output, int root) override;
    PrimsTask barrier_task() override { return execution_->barrier(Call{}); }
    WorkPtr perform(std::vector<PrimsTask> tasks, const CallOptions& options, Tensors outputs) override;
    WorkPtr message(const CallOptions& options, const Tensors& tensor, int peer, int tag) override {
        return message_with_key(options, tensor, peer, static_cast<std::uint32_t>(tag));
    }
    WorkPtr message_with_key(const CallOptions& options, const Tensors& tensor, int peer, PointToPoint::Tag key);
    // The limit applies to rank 0. The other ranks wait at least for the timeout of the group, as with gloo.
    void monitored_barrier(Milliseconds limit, bool wait_all_ranks) override {
        execution_->monitored_barrier(rank_ == 0 ? limit : std::max(limit, options_->timeout), wait_all_ranks);
    }
    c10d::Backend* delegate(const Tensors& tensors) override;
    c10d::Backend* message_delegate(const Tensors& tensors, int tag) override;

    using Taken = std::unique_ptr<Queue, void (*)(Queue*)>;
    Taken take(const char* title, bool wanted);
    c10::weak_intrusive_ptr<PrimsBackend> kept();
    void run(const std::vector<PrimsTask>& tasks, Milliseconds timeout, std::uint64_t entry);
    template <typename Work>
    void recorded(std::uint64_t entry, const Work& work);
    void write_record() const;
    void run_abort_hooks() const;
    void leave();
    c10d::Backend* gloo();
    void take_group_of(PrimsBackend& made);

    // take_group_of() exchanges these.
    std::unique_ptr<const Setup> setup_;
    std::unique_ptr<const TraceGroup> trace_group_;
    std::unique_ptr<LazyBackend> gloo_;
    std::shared_ptr<HostSegment> host_segment_;
    std::shared_ptr<Execution> execution_;
    std::shared_ptr<Queue> queue_;
    std::atomic<std::uint64_t> incrementals_{0}, windows_{0};

    std::uint64_t reconfigured_ = 0;  // the number of groups that reconfigure() has made for this object
    std::set<std::int64_t> used_uuids_;
    mutable std::string handle_;  // empty until it is first needed
    FlightRecorder flight_recorder_;
    mutable std::mutex hooks_guard_;
    std::map<int64_t, std::shared_ptr<const std::function<void()>>> abort_hooks_;  // Python's need the GIL to be copied
    std::optional<ExitAction> leave_at_exit_;
};

}  // namespace dist_prims

extern template class dist_prims::CollectiveBackend<dist_prims::PrimsTask>;
