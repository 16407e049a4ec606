// How a group executes its collectives: on one host (single_host_execution.cpp) or on several
// (multi_host_execution.cpp).
//
// PrimsBackend checks the arguments of a collective and describes it as a Call. An Execution makes the task that runs
// it.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "../../net/multi_host.h"
#include "../../net/schedule_executor.h"
#include "../../shm/host_segment.h"
#include "../common/tensor_arguments.h"

namespace dist_prims {

using Milliseconds = std::chrono::milliseconds;

// A schedule for a range of sizes of a collective, as this rank executes it.
struct NativeSchedule {
    std::uint64_t low = 0, high = 0;  // the sizes in bytes: low <= size < high
    std::string name;
    int segments = 1;
    RankProgram program;
};
using SchedulePtr = std::shared_ptr<const NativeSchedule>;
// Returns the cheapest schedule for a size.
using ChooseSchedule = std::function<NativeSchedule(const std::string& collective, std::uint64_t bytes, int root)>;

// A collective that is ready to run: its arguments are checked, and it owns its memory.
struct PrimsTask {
    Call call;
    std::function<void(const Call& call, Milliseconds timeout)> run;  // agrees on the call first
};

class Execution {
public:
    Execution(std::shared_ptr<HostSegment> host_segment, int rank, int size)
        : host_segment_(std::move(host_segment)), rank_(rank), size_(size) {}
    virtual ~Execution() = default;
    Execution(const Execution&) = delete;

    // Returns when all ranks are about to make this call; throws Mismatch on all of them if one is not.
    virtual void agree(const Call& call, Milliseconds timeout) = 0;
    // The first agreement of the group; see MultiHostGroup::begin().
    virtual LinkCosts begin(const Call& call, std::uint64_t /*network*/, Milliseconds timeout) {
        agree(call, timeout);
        return {};
    }

    // The task of each collective. Inputs are contiguous, outputs may have any layout.
    virtual PrimsTask all_reduce(Call call, const at::Tensor& input, const at::Tensor& output) = 0;
    virtual PrimsTask broadcast(Call call, const at::Tensor& tensor) = 0;
    virtual PrimsTask reduce(Call call, const at::Tensor& input, const at::Tensor& output) = 0;
    virtual PrimsTask all_gather(Call call, const at::Tensor& input, const Tensors& outputs) = 0;
    virtual PrimsTask reduce_scatter(Call call, const Tensors& inputs, const at::Tensor& output) = 0;
    virtual PrimsTask all_to_all(Call call, const Tensors& inputs, const Tensors& outputs) = 0;
    virtual PrimsTask gather(Call call, const at::Tensor& input, const Tensors& outputs) = 0;
    virtual PrimsTask scatter(Call call, const Tensors& inputs, const at::Tensor& output) = 0;
    PrimsTask barrier(const Call& call) {
        return {call, [this](const Call& announced, Milliseconds timeout) { agree(announced, timeout); }};
    }
    // The task of a collective by a given schedule. The tensors are listed by block, undefined where this rank has
    // none, contiguous or not; `counts` has the elements of each block. `check` is called when all ranks are about to
    // make the call, and throws where it must not be made.
    PrimsTask by_schedule(const SchedulePtr& schedule, Call call, const Tensors& inputs, const Tensors& outputs,
                          const Counts& counts, const std::function<void()>& check = nullptr);
    // Returns when all ranks are in the barrier, or names the ranks that are not: the first one, or all of them. Does
    // not run in the queue, because it must find a rank that is blocked in a collective.
    virtual void monitored_barrier(Milliseconds limit, bool wait_all_ranks) = 0;

    // Pins schedules for the all_reduce of their sizes, and unpins all others.
    void pin(std::vector<NativeSchedule> schedules);
    // The schedule for data of `bytes`; null if the slot exchange executes the collective.
    virtual SchedulePtr schedule_for(Collective collective, std::uint64_t bytes, int root = -1) = 0;
    // Whether the slot exchange executes every all_reduce.
    virtual bool has_no_schedules() const { return false; }
    // Whether such a tensor is reduced in place, as a shared tensor.
    virtual bool reduces_in_place(const at::Tensor&) { return false; }

    virtual bool spans_hosts() const { return false; }
    // The backend that carries messages of users with this tag; null: shared memory.
    virtual c10d::Backend* carrier(int) { return nullptr; }
    // Wakes the waits for ranks of other hosts.
    virtual void wake() {}
    // Sends the notice that the group has ended, if there is one, to the other hosts. They see it no other way.
    virtual void forward_notice() {}
    // Sends the other hosts the notice that this rank leaves.
    virtual void forward_leave() {}

protected:
    virtual Router& router() = 0;
    bool has_pins() const { return has_pins_; }
    SchedulePtr pinned(std::uint64_t bytes);
    static SchedulePtr find(const std::vector<SchedulePtr>& schedules, std::uint64_t bytes);
    void execute_schedule(const NativeSchedule& schedule, const Call& call, const ProgramBuffer& buffer,
                          Milliseconds timeout) {
        execute(schedule.program, router(), call.dtype, call.op, buffer, schedule.segments, timeout);
    }

    const std::shared_ptr<HostSegment> host_segment_;
    const int rank_, size_;

private:
    void execute_on_blocks(const NativeSchedule& schedule, const Call& call, const Tensors& inputs,
                           const Tensors& outputs, const Counts& counts, Milliseconds timeout);

    std::mutex pins_guard_;
    std::vector<SchedulePtr> pins_;
    std::atomic<bool> has_pins_{false};
};

std::shared_ptr<Execution> make_single_host_execution(std::shared_ptr<HostSegment> host_segment, int rank, int size);
// Between hosts `transport` carries the messages of collectives, and `engine` those of users.
std::shared_ptr<Execution> make_multi_host_execution(std::shared_ptr<HostSegment> host_segment, int rank, int size,
                                                     Hosts hosts, c10::intrusive_ptr<c10d::Backend> engine,
                                                     std::unique_ptr<Transport> transport, ChooseSchedule choose);

// The first tensor that this rank has; there is one.
const at::Tensor& first_defined(const Tensors& inputs, const Tensors& outputs);

// A contiguous tensor as the data of a schedule, which is changed in place.
ProgramBuffer whole(const at::Tensor& tensor);
// Blocks of given lengths in elements, of which this rank has some inputs and outputs: contiguous, otherwise undefined.
ProgramBuffer in_blocks(const Tensors& inputs, const Tensors& outputs, const Counts& counts);

}  // namespace dist_prims
