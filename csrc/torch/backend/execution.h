// How a group runs its collectives: on one host (single_host_execution.cpp) or on several (multi_host_execution.cpp).
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
struct StartedMessage {
    PrimsWork::Waiter wait;
    std::function<int()> source;  // returns the sender of a message that has come
};

// The bytes that this rank sends to each rank in an exchange, and expects from each.
struct BlockLengths {
    Counts outgoing, incoming;
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

    // Chooses the schedule of a call, and gives it staging buffers where outputs need them. May call Python.
    virtual void prepare(CollectiveCall& call);
    // Agrees on a prepared call with all ranks, and makes it.
    void run(const CollectiveCall& call, Milliseconds timeout);
    // Returns when all ranks are in the barrier, or names the ranks that are not: the first one, or all of them. Does
    // not run in the queue, because it must find a rank that is blocked in a collective.
    virtual void monitored_barrier(Milliseconds limit, bool wait_all_ranks) = 0;

    // Pins schedules for a collective, in place of those that were pinned for it; null: pins none. `text`
    // describes them, and `make` is called when a root is first used.
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
    virtual StartedMessage start_message(const UserMessage& message);
    // The group has ended: ends all messages between hosts.
    virtual void close_messages(const std::exception_ptr&) {}
    // Wakes the waits for ranks of other hosts.
    virtual void wake() {}
    // Sends the notice that the group has ended, if there is one, to the other hosts. They see it no other way.
    virtual void forward_notice() {}
    // Sends the other hosts the notice that this rank leaves.
    virtual void forward_leave() {}
    // See RemotePeers.
    virtual std::vector<std::pair<int, int>> cut_links() { return {}; }
    // This rank leaves the group outside of a call. Other hosts must not take the end of its connections for a death.
    virtual void leave() {}

protected:
    virtual Router& router() = 0;
    // Runs a call without a schedule.
    virtual void run_by_slots(const CollectiveCall& call, Milliseconds timeout) = 0;
    // See MultiHostGroup::agree_and_move(). Only called for a schedule that is_piggyback.
    virtual Terms agree_and_move(const Call&, const ProgramBuffer&, Milliseconds, const Terms& /*terms*/,
                                 const Terms& /*wanted*/) {
        throw std::logic_error("data that travels with an agreement, in a group on one host");
    }
    // The schedule of an exchange whose blocks differ in length; null: phases of the slot exchange.
    virtual SchedulePtr schedule_for_uneven(const CollectiveCall&) { return nullptr; }
    // Throws Mismatch on all ranks of an exchange in which the lengths of two differ.
    virtual void compare_lengths(const CollectiveCall& call, const BlockLengths& lengths, Milliseconds timeout) = 0;
    SchedulePtr pinned_schedule(Collective collective, std::uint64_t bytes, int root);
    static SchedulePtr schedule_for_size(const std::vector<SchedulePtr>& schedules, std::uint64_t bytes);
    BlockLengths block_lengths(const CollectiveCall& call) const;

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

    std::shared_ptr<Pins> pins_of(Collective collective);
    void prepare_variable_length(CollectiveCall& call);
    void run_variable_length(const CollectiveCall& call, Milliseconds timeout);
    void execute_schedule(const NativeSchedule& schedule, const CollectiveCall& call, Milliseconds timeout);
    std::uint64_t mismatch_term(const BlockLengths& lengths) const;

    std::mutex pins_guard_;
    std::array<std::shared_ptr<Pins>, kCollectives> pins_;
    std::array<std::atomic<bool>, kCollectives> has_pins_{};
};

std::shared_ptr<Execution> make_single_host_execution(std::shared_ptr<HostSegment> host_segment, int rank, int size);
// `transport` carries the messages between hosts.
std::shared_ptr<Execution> make_multi_host_execution(std::shared_ptr<HostSegment> host_segment, int rank, int size,
                                                     Hosts hosts, std::unique_ptr<Transport> transport,
                                                     ChooseSchedule choose);

// Blocks of given lengths in elements, of which this rank has some inputs and outputs: packed, otherwise undefined.
ProgramBuffer program_buffer(const Tensors& inputs, const Tensors& outputs, const Counts& counts);

}  // namespace dist_prims
