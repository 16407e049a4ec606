// How a group runs its calls: on one host (SingleHostExecution) or on several (MultiHostExecution).
//
// A CollectiveCall is prepared on the thread that calls, and then runs in the queue: by its schedule, if one is named,
// pinned for the size or, between hosts, chosen by price; otherwise in phases of the slot exchange of one
// host.
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
#include "../../net/user_messages.h"
#include "../../shm/host_segment.h"
#include "../common/work.h"
#include "collective_call.h"

namespace dist_prims {

using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kBetweenDiagnoses{10};  // of a wait that is too late, until a diagnosis is final

// Returns the cheapest schedule for a size; without a size, the schedule for blocks of different lengths.
using ChooseSchedule =
    std::function<NativeSchedule(const std::string& collective, std::uint64_t bytes, int root, bool is_even)>;
// Returns the pinned schedules of a collective for a root, which is -1 where there is none.
using MakePins = std::function<std::vector<NativeSchedule>(int root)>;

// A message that a user sends, or a receive.
struct UserMessage {
    bool outgoing;
    int peer;  // of a receive also PointToPoint::kAnyone
    PointToPoint::Tag tag;
    UserMessages::Memory memory;
    Milliseconds timeout;
    PointToPoint::Done done;  // called once when the message is done, with its error or null
};

// A message that a transport or shared memory moves now.
struct StartedMessage {
    PrimsWork::Waiter wait;
    std::function<int()> source;  // returns the rank from which a message has come
};

// By rank: the bytes that this rank sends to each rank in a variable-length call, and expects from each.
struct BlockLengths {
    Counts outgoing, incoming;
};

class Execution : public std::enable_shared_from_this<Execution> {
public:
    Execution(std::shared_ptr<HostSegment> host_segment, int rank, int size)
        : host_segment_(std::move(host_segment)), rank_(rank), size_(size) {}
    virtual ~Execution() = default;
    Execution(const Execution&) = delete;

    // Returns when all ranks are about to make this call; throws Mismatch on every rank if two calls differ. Returns
    // the sum of the terms of all ranks.
    virtual Terms agree(const Call& call, Milliseconds timeout, const Terms& terms) = 0;
    void agree(const Call& call, Milliseconds timeout) { agree(call, timeout, {}); }
    // The first agreement of the group; see MultiHostGroup::first_agreement().
    virtual LinkCosts first_agreement(const Call& call, std::uint64_t /*network*/, Milliseconds timeout) {
        agree(call, timeout);
        return {};
    }

    // Chooses the schedule of a call, and gives it staging buffers where outputs need them. Runs on the thread of the
    // caller, and may call Python.
    virtual void prepare(CollectiveCall& call);
    // Agrees on a prepared call with all ranks, and runs it. The calling thread has the queue.
    void run(const CollectiveCall& call, Milliseconds timeout);
    // Returns when all ranks are in the barrier. After `limit` rank 0 throws an error that names the first rank that is
    // not, or with `wait_all_ranks` all of them. Runs outside of the queue: it must find a rank that is blocked in a
    // collective.
    virtual void monitored_barrier(Milliseconds limit, bool wait_all_ranks) = 0;

    // Pins schedules for a collective, in place of its earlier pins. `make` returns them, and is called when a root is
    // first used; null: the collective has no pins any more. `text` describes them.
    void pin(Collective collective, const std::string& text, MakePins make);
    // The schedule for data of `bytes`; null: phases of the slot exchange.
    virtual SchedulePtr schedule_for(Collective collective, std::uint64_t bytes, int root) = 0;
    bool has_pins(Collective collective) const { return has_pins_[static_cast<std::size_t>(collective)]; }
    // Whether an all_reduce of the tensor works on its own memory, which the other ranks of the host can map.
    virtual bool reduces_in_place(const at::Tensor&) { return false; }

    virtual bool spans_hosts() const { return false; }
    // Throws if messages of users may not have this tag.
    virtual void check_tag(int) const {}
    // Starts a message through shared memory; the peer must be a rank of this host.
    virtual StartedMessage start_message(const UserMessage& message);
    // The group has ended: ends all messages between hosts.
    virtual void close_messages(const std::exception_ptr&) {}
    // Wakes the waits for ranks of other hosts.
    virtual void wake() {}
    // If a notice says that the group has ended, sends it to the other hosts: they do not see the memory of this host.
    virtual void forward_notice() {}
    // Ends the group on all hosts, by the notice that this rank leaves.
    virtual void end_on_all_hosts() {}
    // See RemotePeers.
    virtual std::vector<std::pair<int, int>> cut_links() { return {}; }
    // This rank leaves the group outside of a call. Other hosts must not take the end of its connections for a death.
    virtual void leave() {}

protected:
    virtual Router& router() = 0;
    // Runs a call without a schedule.
    virtual void run_by_slots(const CollectiveCall& call, Milliseconds timeout) = 0;
    // Runs a call whose schedule is_piggyback: agrees, and moves the data if the sum of the terms is `wanted`. See
    // MultiHostGroup::agree_and_move().
    virtual Terms agree_and_move(const Call&, const ProgramBuffer&, Milliseconds, const Terms& /*terms*/,
                                 const Terms& /*wanted*/) {
        throw std::logic_error("data that travels with an agreement, in a group on one host");
    }
    // The schedule of a variable-length call whose blocks differ in length; null: phases of the slot exchange.
    virtual SchedulePtr schedule_for_uneven(const CollectiveCall&) { return nullptr; }
    // Throws Mismatch on every rank if a rank sends another length than its peer expects.
    virtual void compare_lengths(const CollectiveCall& call, const BlockLengths& lengths, Milliseconds timeout) = 0;
    // The pinned schedule of a collective for data of `bytes`; null if there is none.
    SchedulePtr pinned_schedule(Collective collective, std::uint64_t bytes, int root);
    static SchedulePtr schedule_for_size(const std::vector<SchedulePtr>& schedules, std::uint64_t bytes);
    BlockLengths block_lengths(const CollectiveCall& call) const;

    const std::shared_ptr<HostSegment> host_segment_;
    const int rank_, size_;

private:
    // The pins of one collective; see pin().
    struct Pins {
        std::string text;
        MakePins make;
        std::map<int, std::vector<SchedulePtr>> by_root;  // what `make` has returned; under pins_guard_
    };
    static constexpr std::size_t kCollectives = 9;

    std::shared_ptr<Pins> pins_of(Collective collective);
    void prepare_variable_length(CollectiveCall& call);
    void run_variable_length(const CollectiveCall& call, Milliseconds timeout);
    void execute_schedule(const NativeSchedule& schedule, const CollectiveCall& call, Milliseconds timeout);
    std::uint64_t mismatch_term(const BlockLengths& lengths) const;

    std::mutex pins_guard_;
    std::array<std::shared_ptr<Pins>, kCollectives> pins_;  // by Collective
    std::array<std::atomic<bool>, kCollectives> has_pins_{};
};

std::shared_ptr<Execution> make_single_host_execution(std::shared_ptr<HostSegment> host_segment, int rank, int size);
// `transport` carries the messages between hosts.
std::shared_ptr<Execution> make_multi_host_execution(std::shared_ptr<HostSegment> host_segment, int rank, int size,
                                                     Hosts hosts, std::unique_ptr<Transport> transport,
                                                     ChooseSchedule choose);

// The blocks of a schedule in memory, each of counts[block] elements. A tensor that this rank has is packed, one that
// it does not have is undefined.
ProgramBuffer program_buffer(const Tensors& inputs, const Tensors& outputs, const Counts& counts);

}  // namespace dist_prims
