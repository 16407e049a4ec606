#include "execution.h"

#include <algorithm>
#include <stdexcept>

#include "../../common/checksum.h"
#include "../common/python_use.h"

namespace dist_prims {

namespace {

// Packs the inputs of a call, and gives staging buffers to the outputs that are not packed. If an output shares memory
// with an input or with another output, all outputs get staging buffers: the call would else write what it has still to
// read.
void stage_outputs(CollectiveCall& call) {
    for (at::Tensor& input : call.inputs) {
        if (input.defined() && !is_packed(input)) input = packed(input);
    }
    const bool is_in_place = call.inputs.size() == 1 && call.inputs[0].is_same(call.outputs[0]);
    const bool overlap = !is_in_place && outputs_overlap(call.inputs, call.outputs);
    const auto needs_staging = [&](const at::Tensor& output) {
        return output.defined() && (overlap || !is_packed(output));
    };
    if (std::none_of(call.outputs.begin(), call.outputs.end(), needs_staging)) return;
    call.user_outputs = call.outputs;
    for (at::Tensor& output : call.outputs) {
        if (!needs_staging(output)) continue;
        must_be_distinct(name_of(call.announced.collective), output);
        output = packed_buffer(output);
    }
}

// Copies staging buffers to the outputs, in the order of the blocks.
void deliver(const CollectiveCall& call) {
    for (std::size_t block = 0; block < call.user_outputs.size(); ++block) {
        if (!call.user_outputs[block].is_same(call.outputs[block]))
            copy_result(call.user_outputs[block], call.outputs[block]);
    }
}

// Gives an all_to_all the two blocks for each rank that its schedule needs; see CollectiveCall.
void separate_blocks(CollectiveCall& call) {
    const Counts received = element_counts(call.outputs);
    call.outputs.insert(call.outputs.begin(), call.inputs.size(), at::Tensor());
    call.inputs.resize(call.outputs.size());
    call.counts.insert(call.counts.end(), received.begin(), received.end());
}

bool is_even(const Counts& counts) {
    return std::all_of(counts.begin(), counts.end(), [&](std::size_t count) { return count == counts[0]; });
}

}  // namespace

void Execution::prepare(CollectiveCall& call) {
    // 1. Choose the schedule. On one host without pins, phases compare the lengths of a variable-length call
    // themselves.
    const Collective collective = call.announced.collective;
    call.is_variable_length = call.is_variable_length && (call.schedule || spans_hosts() || has_pins(collective));
    if (call.is_variable_length) {
        prepare_variable_length(call);
    } else if (!call.schedule && !call.incremental) {
        call.schedule = collective == Collective::kBarrier
                            ? pinned_schedule(collective, 0, -1)
                            : schedule_for(collective, call.bytes(), call.announced.root);
    }
    if (call.schedule && !call.is_variable_length) call.announced.set_algorithm(call.schedule->name);
    if (call.schedule && collective == Collective::kBarrier && call.inputs.empty()) {
        call.inputs = call.outputs = {at::zeros({1}, at::kByte)};  // a message without data would not be sent
        call.counts = {1};
    }
    // 2. Make the tensors ready.
    stage_outputs(call);
}

// Chooses a schedule for blocks of one length. The schedule for blocks of different lengths is chosen when the ranks
// know that it is needed.
void Execution::prepare_variable_length(CollectiveCall& call) {
    const Call& announced = call.announced;
    const auto size = static_cast<std::size_t>(size_);
    if (announced.collective == Collective::kAllToAll && call.inputs.size() == size) separate_blocks(call);
    if (call.schedule) {
        call.announced.set_algorithm(call.schedule->name);
        call.is_schedule_named = true;
        return;
    }
    if (const auto pins = pins_of(announced.collective)) call.announced.set_algorithm(pins->text);
    const std::uint64_t bytes = size * call.counts[0] * size_of(announced.dtype);
    if (is_even(call.counts)) call.schedule = schedule_for(announced.collective, bytes, announced.root);
}

void Execution::run(const CollectiveCall& call, Milliseconds timeout) {
    const Call& announced = call.announced;
    if (call.is_variable_length) {
        run_variable_length(call, timeout);
    } else if (call.incremental) {
        host_segment_->slots.open(announced, timeout);
        call.incremental->finish(*host_segment_);
    } else if (!call.schedule) {
        run_by_slots(call, timeout);
    } else if (call.schedule->is_piggyback) {
        agree_and_move(announced, program_buffer(call.inputs, call.outputs, call.counts), timeout, {}, {});
    } else {
        agree(announced, timeout);
        if (call.check) call.check();
        execute_schedule(*call.schedule, call, timeout);
    }
    deliver(call);
}

// A rank does not know whether all blocks of the other ranks have one length, as the schedule requires. Each rank
// therefore adds three terms to the agreement:
//
//     mismatch_term() of its lengths    the sum is 0 if what each rank sends is what its peer expects
//     1 if its blocks differ in length  the sum is 0 if the blocks of no rank differ
//     a checksum of its schedule        the sum is size times this checksum if all ranks have the same
//
// If all pairs match and no rank has blocks of different lengths, all blocks have one length.
void Execution::run_variable_length(const CollectiveCall& call, Milliseconds timeout) {
    // 1. Agree on the call, and add the terms of all ranks. Small data travels with the agreement, and then all is
    // done.
    const BlockLengths lengths = block_lengths(call);
    const std::uint64_t schedule_checksum = Checksum().add(call.schedule ? call.schedule->name : "").value();
    const Terms terms{mismatch_term(lengths), is_even(call.counts) ? 0u : 1u, schedule_checksum};
    const Terms matching_terms{0, 0, schedule_checksum * static_cast<std::uint64_t>(size_)};
    const bool is_piggyback = call.schedule && call.schedule->is_piggyback;
    const Terms sum = is_piggyback
                          ? agree_and_move(call.announced, program_buffer(call.inputs, call.outputs, call.counts),
                                           timeout, terms, matching_terms)
                          : agree(call.announced, timeout, terms);
    if (is_piggyback && sum == matching_terms) return;
    // 2. If lengths do not match, or schedules differ, throw Mismatch on every rank.
    const auto [difference, uneven_ranks, checksum_sum] = sum;
    if (difference != 0) compare_lengths(call, lengths, timeout);
    const bool all_even = difference == 0 && uneven_ranks == 0;
    if (all_even && checksum_sum != matching_terms[2]) {
        Call named = call.announced;
        named.set_algorithm(call.schedule ? call.schedule->name : "");
        agree(named, timeout);
    }
    // 3. Run the schedule for blocks of one length, or for different lengths, or phases of the slot exchange.
    const SchedulePtr schedule = all_even || call.is_schedule_named ? call.schedule : schedule_for_uneven(call);
    if (!schedule) return run_by_slots(call, timeout);
    if (call.check) call.check();
    execute_schedule(*schedule, call, timeout);
}

BlockLengths Execution::block_lengths(const CollectiveCall& call) const {
    const auto size = static_cast<std::size_t>(size_);
    BlockLengths lengths{Counts(size), Counts(size)};
    const std::size_t element = size_of(call.announced.dtype);
    const bool is_all_to_all = call.announced.collective == Collective::kAllToAll;  // otherwise it is a gather
    for (std::size_t peer = 0; peer < size; ++peer) {
        const std::size_t received = call.outputs.size() - size + peer;  // the block from the peer
        if (is_all_to_all) lengths.outgoing[peer] = call.counts[peer] * element;
        if (is_all_to_all || rank_ == call.announced.root) lengths.incoming[peer] = call.counts[received] * element;
    }
    if (!is_all_to_all)
        lengths.outgoing[static_cast<std::size_t>(call.announced.root)] =
            call.inputs[static_cast<std::size_t>(rank_)].nbytes();
    return lengths;
}

// Adds a checksum of (sender, receiver, length) for each block that this rank sends, and subtracts one for each block
// that it expects. Each block is added by its sender and subtracted by its receiver: the sum over all ranks, modulo
// 2^64, is 0 if all lengths match, and otherwise not 0 but by a collision of checksums.
std::uint64_t Execution::mismatch_term(const BlockLengths& lengths) const {
    const auto mine = static_cast<std::uint64_t>(rank_);
    std::uint64_t difference = 0;
    for (std::uint64_t peer = 0; peer < lengths.outgoing.size(); ++peer) {
        const std::uint64_t sent = lengths.outgoing[peer], expected = lengths.incoming[peer];
        if (sent) difference += Checksum().add(mine).add(peer).add(sent).value();
        if (expected) difference -= Checksum().add(peer).add(mine).add(expected).value();
    }
    return difference;
}

void Execution::execute_schedule(const NativeSchedule& schedule, const CollectiveCall& call, Milliseconds timeout) {
    const Op op = call.announced.collective == Collective::kBarrier ? Op::kBitOr : call.announced.op;
    execute(schedule.program, router(), call.announced.dtype, op,
            program_buffer(call.inputs, call.outputs, call.counts), schedule.segments, timeout);
}

StartedMessage Execution::start_message(const UserMessage& message) {
    const auto& [data, bytes, owner] = message.memory;
    PointToPoint& p2p = host_segment_->p2p;
    const auto request = message.outgoing
                             ? p2p.send(message.peer, message.tag, data, bytes, message.timeout, message.done)
                             : p2p.receive(message.peer, message.tag, data, bytes, message.timeout, message.done);
    // After `limit` it finds the culprit, ends the group and throws.
    const auto wait = [host_segment = host_segment_, request](Milliseconds limit) {
        PointToPoint& p2p = host_segment->p2p;
        Membership& membership = host_segment->membership;
        if (p2p.wait(request, limit)) return;
        try {
            LongWait waiting(membership.wait_graph());
            do {
                waiting.published.set(p2p.wait_edge(request));
                if (p2p.wait(request, kBetweenDiagnoses)) return;
            } while (!membership.is_final(waiting.diagnosis, {p2p.wait_edge(request)}, limit));
            membership.throw_timeout(std::to_string(limit.count()) + " ms in the wait for " + p2p.text(*request),
                                     waiting.diagnosis.verdict());
        } catch (const CommError&) {
            p2p.wait(request, Milliseconds::max());  // the request ends at its next check for failures
            throw;
        }
    };
    const auto source = [host_segment = host_segment_, request] {
        return request->peer < 0 ? request->peer : host_segment->membership.group_rank(request->peer);
    };
    return {wait, source};
}

void Execution::pin(Collective collective, const std::string& text, MakePins make) {
    const auto index = static_cast<std::size_t>(collective);
    auto pins = make ? std::make_shared<Pins>(Pins{text, std::move(make), {}}) : nullptr;
    const std::lock_guard lock(pins_guard_);
    has_pins_[index] = pins != nullptr;
    std::swap(pins_[index], pins);  // the earlier pins are destroyed without the lock
}

std::shared_ptr<Execution::Pins> Execution::pins_of(Collective collective) {
    if (!has_pins(collective)) return nullptr;
    const std::lock_guard lock(pins_guard_);
    return pins_[static_cast<std::size_t>(collective)];
}

// Python makes the schedules. It is called without the lock: a signal handler may run there and need a schedule.
SchedulePtr Execution::pinned_schedule(Collective collective, std::uint64_t bytes, int root) {
    const auto pins = pins_of(collective);
    if (!pins) return nullptr;
    {
        const std::lock_guard lock(pins_guard_);
        if (const auto known = pins->by_root.find(root); known != pins->by_root.end())
            return schedule_for_size(known->second, bytes);
    }
    std::vector<SchedulePtr> schedules;
    for (NativeSchedule& schedule : pins->make(root))
        schedules.push_back(std::make_shared<const NativeSchedule>(std::move(schedule)));
    const std::lock_guard lock(pins_guard_);
    return schedule_for_size(pins->by_root.try_emplace(root, std::move(schedules)).first->second, bytes);
}

SchedulePtr Execution::schedule_for_size(const std::vector<SchedulePtr>& schedules, std::uint64_t bytes) {
    const auto found = std::find_if(schedules.begin(), schedules.end(),
                                    [&](const auto& each) { return each->low <= bytes && bytes < each->high; });
    return found == schedules.end() ? nullptr : *found;
}

ProgramBuffer program_buffer(const Tensors& inputs, const Tensors& outputs, const Counts& counts) {
    ProgramBuffer buffer;
    for (std::size_t block = 0; block < counts.size(); ++block) {
        buffer.blocks.push_back({address_of(inputs[block]), address_of(outputs[block]), counts[block]});
    }
    buffer.owner = droppable(std::pair<Tensors, Tensors>(inputs, outputs));
    return buffer;
}

}  // namespace dist_prims
