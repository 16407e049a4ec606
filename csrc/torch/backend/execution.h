// How a group executes its collectives: on one host (single_host_execution.cpp) or on several
// (multi_host_execution.cpp).
//
// PrimsBackend checks the arguments of a collective and describes it as a Call. An Execution makes the task that runs
// it: by a schedule, if one is pinned for the size or, between hosts, chosen by price.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "../../net/multi_host.h"
#include "../../net/schedule_executor.h"
#include "../../net/user_messages.h"
#include "../../shm/host_segment.h"
#include "../common/tensor_arguments.h"
#include "../common/work.h"

namespace dist_prims {

using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kBetweenDiagnoses{10};  // of a wait that is too late, until a diagnosis is final

// A schedule for a range of sizes of a collective, as this rank executes it.
struct NativeSchedule {
    std::uint64_t low = 0, high = 0;  // the sizes in bytes: low <= size < high
    std::string name;
    int segments = 1;
    RankProgram program{};
    bool is_slower_than_piggyback = false;
    bool is_piggyback = false;  // no program: the data travels in the messages of the agreement (net/piggyback.h)
};
using SchedulePtr = std::shared_ptr<const NativeSchedule>;
// Returns the cheapest schedule for a size; without a size, the schedule for blocks of different lengths.
using ChooseSchedule =
    std::function<NativeSchedule(const std::string& collective, std::uint64_t bytes, int root, bool is_even)>;
// Returns the pinned schedules of a collective for a root, which is -1 where there is none.
using MakePins = std::function<std::vector<NativeSchedule>(int root)>;

// A collective that is ready to run: its arguments are checked, and it owns its memory.
struct PrimsTask {
    using Run = std::function<void(const Call& call, Milliseconds timeout)>;

    Call call;
    Run run;  // agrees on the call first
};

// A message of a user that is to be sent or received.
struct UserMessage {
    bool outgoing;
    int peer;  // of a receive also PointToPoint::kAnyone
    PointToPoint::Tag tag;
    UserMessages::Memory memory;
    Milliseconds timeout;
    PointToPoint::Done done;
};

// A message that has begun.
struct BegunMessage {
    PrimsWork::Waiter wait;
    std::function<int()> source;  // returns the sender of a message that has come
};

// The data of an all_to_all or a gather, of which a rank knows the lengths of its own blocks only. The schedule of an
// all_to_all has two blocks for each rank: first those that are sent, then those that are received.
struct Exchange {
    Tensors inputs, outputs;    // by block of the schedule, undefined where this rank has none
    Counts counts;              // elements of each block
    Counts outgoing, incoming;  // bytes that this rank sends to each rank, and expects from each

    bool is_even() const;         // whether all blocks that this rank knows have one length
    std::uint64_t bytes() const;  // that this rank sends or receives, whichever is more
};

class Execution : public std::enable_shared_from_this<Execution> {
public:
    Execution(std::shared_ptr<HostSegment> host_segment, int rank, int size)
        : host_segment_(std::move(host_segment)), rank_(rank), size_(size) {}
    virtual ~Execution() = default;
    Execution(const Execution&) = delete;

    // Returns when all ranks are about to make this call; throws Mismatch on all of them if one is not. The result is
    // the sum of the terms of all ranks.
    virtual Terms agree(const Call& call, Milliseconds timeout, const Terms& terms) = 0;
    void agree(const Call& call, Milliseconds timeout) { agree(call, timeout, {}); }
    // The first agreement of the group; see MultiHostGroup::first_agreement().
    virtual LinkCosts first_agreement(const Call& call, std::uint64_t /*network*/, Milliseconds timeout) {
        agree(call, timeout);
        return {};
    }

    // The task of each collective, by the schedule that schedule_for() returns. Inputs are contiguous, outputs may have
    // any layout. No output may share memory with another tensor; see outputs_overlap().
    virtual PrimsTask all_reduce(Call call, const at::Tensor& input, const at::Tensor& output);
    virtual PrimsTask broadcast(Call call, const at::Tensor& tensor);
    virtual PrimsTask reduce(Call call, const at::Tensor& input, const at::Tensor& output);
    virtual PrimsTask all_gather(Call call, const at::Tensor& input, const Tensors& outputs);
    virtual PrimsTask reduce_scatter(Call call, const Tensors& inputs, const at::Tensor& output);
    virtual PrimsTask scatter(Call call, const Tensors& inputs, const at::Tensor& output);
    virtual PrimsTask all_to_all(Call call, const Tensors& inputs, const Tensors& outputs) = 0;
    virtual PrimsTask gather(Call call, const at::Tensor& input, const Tensors& outputs) = 0;
    // The agreement on the call is a barrier. A pinned schedule runs after it.
    PrimsTask barrier(const Call& call);
    // The task of a collective by a given schedule. The tensors are listed by block, undefined where this rank has
    // none, contiguous or not; `counts` has the elements of each block. `check` is called when all ranks are about to
    // make the call, and throws where it must not be made.
    PrimsTask by_schedule(const SchedulePtr& schedule, Call call, const Tensors& inputs, const Tensors& outputs,
                          const Counts& counts, const std::function<void()>& check = nullptr);
    // The same for an all_to_all whose schedule forwards no block, or in which each rank that calls it has blocks of
    // one length: throws Mismatch on all ranks if two differ on the length of a block.
    PrimsTask exchange_by(const SchedulePtr& schedule, Call call, const Exchange& blocks,
                          const std::function<void()>& check);
    Exchange all_to_all_blocks(const Tensors& inputs, const Tensors& outputs) const;
    // The list of blocks in which this rank has only its own.
    Tensors own_block(const at::Tensor& tensor) const;
    // Returns when all ranks are in the barrier, or names the ranks that are not: the first one, or all of them. Does
    // not run in the queue, because it must find a rank that is blocked in a collective.
    virtual void monitored_barrier(Milliseconds limit, bool wait_all_ranks) = 0;

    // Pins schedules for a collective, in place of those that were pinned for it; null: pins none. `text` describes
    // them, and `make` is called when a root is first used.
    void pin(Collective collective, const std::string& text, MakePins make);
    // The schedule for data of `bytes`; null if the execution needs none.
    virtual SchedulePtr schedule_for(Collective collective, std::uint64_t bytes, int root) = 0;
    bool has_pins(Collective collective) const { return has_pins_[static_cast<std::size_t>(collective)]; }
    // Whether such a tensor is reduced in place, as a shared tensor.
    virtual bool reduces_in_place(const at::Tensor&) { return false; }

    virtual bool spans_hosts() const { return false; }
    // Throws if messages of users may not have this tag.
    virtual void check_tag(int) const {}
    // Sends or receives through shared memory; the peer is a rank of this host.
    virtual BegunMessage begin_message(const UserMessage& message);
    // The group has ended: ends all messages between hosts.
    virtual void close_messages(const std::exception_ptr&) {}
    // Wakes the waits for ranks of other hosts.
    virtual void wake() {}
    // Sends the notice that the group has ended, if there is one, to the other hosts. They see it no other way.
    virtual void forward_notice() {}
    // Sends the other hosts the notice that this rank leaves.
    virtual void forward_leave() {}
    // This rank leaves the group outside of a call. Other hosts must not take the end of its connections for a death.
    virtual void leave() {}

protected:
    virtual Router& router() = 0;
    // See MultiHostGroup::agree_and_move(). Only called for a schedule that is_piggyback.
    virtual Terms agree_and_move(const Call&, const ProgramBuffer&, Milliseconds, const Terms& /*terms*/,
                                 const Terms& /*wanted*/) {
        throw std::logic_error("data that travels with an agreement, in a group on one host");
    }
    // Throws Mismatch on all ranks if the lengths of two differ. Nothing to do where the exchange itself does so.
    virtual void compare_lengths(const Call&, const Exchange&, Milliseconds) {}
    SchedulePtr schedule_for(const Call& call, std::size_t blocks = 1) {
        return schedule_for(call.collective, call.count * blocks * size_of(call.dtype), call.root);
    }
    SchedulePtr pinned(Collective collective, std::uint64_t bytes, int root);
    static SchedulePtr find(const std::vector<SchedulePtr>& schedules, std::uint64_t bytes);
    Exchange gather_blocks(int root, const at::Tensor& input, const Tensors& outputs) const;
    // The task of an exchange: by a schedule if all blocks of all ranks have one length, otherwise by `uneven`, which
    // is called when all ranks are about to make the call.
    PrimsTask exchange(Call call, const Exchange& blocks, PrimsTask::Run uneven);
    void execute_schedule(const NativeSchedule& schedule, const Call& call, const ProgramBuffer& buffer,
                          Milliseconds timeout) {
        execute(schedule.program, router(), call.dtype, call.op, buffer, schedule.segments, timeout);
    }
    void execute_on_blocks(const NativeSchedule& schedule, const Call& call, const Tensors& inputs,
                           const Tensors& outputs, const Counts& counts, Milliseconds timeout);
    // Agrees on the call and moves the blocks with it, if the sum of the terms of all ranks is `wanted`. Returns the
    // sum.
    Terms agree_and_move_blocks(const Call& call, const Tensors& inputs, const Tensors& outputs, const Counts& counts,
                                Milliseconds timeout, const Terms& terms = {}, const Terms& wanted = {});

    const std::shared_ptr<HostSegment> host_segment_;
    const int rank_, size_;

private:
    // What is pinned for one collective.
    struct Pins {
        std::string text;
        MakePins make;
        std::map<int, std::vector<SchedulePtr>> by_root;
    };
    static constexpr std::size_t kCollectives = 9;

    std::shared_ptr<Pins> pins(Collective collective);
    std::uint64_t difference_of_lengths(const Exchange& blocks) const;

    std::mutex pins_guard_;
    std::array<std::shared_ptr<Pins>, kCollectives> pins_;
    std::array<std::atomic<bool>, kCollectives> has_pins_{};
};

std::shared_ptr<Execution> make_single_host_execution(std::shared_ptr<HostSegment> host_segment, int rank, int size);
// `transport` carries the messages between hosts.
std::shared_ptr<Execution> make_multi_host_execution(std::shared_ptr<HostSegment> host_segment, int rank, int size,
                                                     Hosts hosts, std::unique_ptr<Transport> transport,
                                                     ChooseSchedule choose);

// The first tensor that this rank has; there is one.
const at::Tensor& first_defined(const Tensors& inputs, const Tensors& outputs);

// A contiguous tensor as the data of a schedule, which is changed in place.
ProgramBuffer whole(const at::Tensor& tensor);
// Blocks of given lengths in elements, of which this rank has some inputs and outputs: contiguous, otherwise undefined.
ProgramBuffer in_blocks(const Tensors& inputs, const Tensors& outputs, const Counts& counts);

}  // namespace dist_prims
