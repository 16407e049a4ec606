#include "execution.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "../../common/checksum.h"

namespace dist_prims {

const at::Tensor& first_defined(const Tensors& inputs, const Tensors& outputs) {
    for (const Tensors* each : {&inputs, &outputs}) {
        const auto found = std::find_if(each->begin(), each->end(), [](const auto& one) { return one.defined(); });
        if (found != each->end()) return *found;
    }
    throw std::invalid_argument("a collective needs a tensor");
}

bool Exchange::is_even() const {
    return std::all_of(counts.begin(), counts.end(), [&](std::size_t count) { return count == counts[0]; });
}

std::uint64_t Exchange::bytes() const {
    return std::max(std::accumulate(outgoing.begin(), outgoing.end(), std::uint64_t{0}),
                    std::accumulate(incoming.begin(), incoming.end(), std::uint64_t{0}));
}

PrimsTask Execution::all_reduce(Call call, const at::Tensor& input, const at::Tensor& output) {
    return by_schedule(schedule_for(call), call, {input}, {output}, {call.count});
}

// The root's tensor is changed in place if it can be: some schedules send the root data that it has.
PrimsTask Execution::broadcast(Call call, const at::Tensor& tensor) {
    const bool is_root = rank_ == call.root;
    return by_schedule(schedule_for(call), call, {is_root ? packed(tensor) : at::Tensor()},
                       {is_root && !is_packed(tensor) ? at::Tensor() : tensor}, {call.count});
}

PrimsTask Execution::reduce(Call call, const at::Tensor& input, const at::Tensor& output) {
    return by_schedule(schedule_for(call), call, {input}, {rank_ == call.root ? output : at::Tensor()}, {call.count});
}

PrimsTask Execution::all_gather(Call call, const at::Tensor& input, const Tensors& outputs) {
    return by_schedule(schedule_for(call), call, own_block(input), outputs, elements(outputs));
}

PrimsTask Execution::reduce_scatter(Call call, const Tensors& inputs, const at::Tensor& output) {
    return by_schedule(schedule_for(call), call, inputs, own_block(output), elements(inputs));
}

// The ranks agree on the length of a block, and the root has compared its list with it.
PrimsTask Execution::scatter(Call call, const Tensors& inputs, const at::Tensor& output) {
    const auto size = static_cast<std::size_t>(size_);
    return by_schedule(schedule_for(call, size), call, rank_ == call.root ? inputs : Tensors(size), own_block(output),
                       Counts(size, call.count));
}

PrimsTask Execution::barrier(const Call& call) {
    const SchedulePtr schedule = pinned(Collective::kBarrier, 0, -1);
    if (!schedule) return {call, [this](const Call& call, Milliseconds timeout) { agree(call, timeout); }};
    Call named = call;
    named.by(schedule->name);
    return {named, [this, schedule](const Call& call, Milliseconds timeout) {
                agree(call, timeout);
                Call data;  // a message without data would not be sent
                data.op = Op::kBitOr;
                execute_schedule(*schedule, data, whole(at::zeros({1}, at::kByte)), timeout);
            }};
}

Tensors Execution::own_block(const at::Tensor& tensor) const {
    Tensors blocks(static_cast<std::size_t>(size_));
    blocks[static_cast<std::size_t>(rank_)] = tensor;
    return blocks;
}

Exchange Execution::all_to_all_blocks(const Tensors& inputs, const Tensors& outputs) const {
    const Tensors none(inputs.size());
    Exchange blocks{inputs, none, elements(inputs), lengths(inputs), lengths(outputs)};
    blocks.inputs.insert(blocks.inputs.end(), none.begin(), none.end());
    blocks.outputs.insert(blocks.outputs.end(), outputs.begin(), outputs.end());
    const Counts received = elements(outputs);
    blocks.counts.insert(blocks.counts.end(), received.begin(), received.end());
    return blocks;
}

Exchange Execution::gather_blocks(int root, const at::Tensor& input, const Tensors& outputs) const {
    const auto size = static_cast<std::size_t>(size_);
    const bool is_root = rank_ == root;
    Exchange blocks{own_block(input), is_root ? outputs : Tensors(size),
                    is_root ? elements(outputs) : Counts(size, static_cast<std::size_t>(input.numel())), Counts(size),
                    is_root ? lengths(outputs) : Counts(size)};
    blocks.outgoing[static_cast<std::size_t>(root)] = input.nbytes();
    return blocks;
}

// A rank cannot know whether the blocks of others have one length, and so whether there is a schedule for the call.
// Each rank therefore adds two terms to the agreement: the difference of its lengths, which tells all ranks whether
// the lengths of each pair match; and 1 if its blocks differ in length, or else a checksum of the schedule that it
// would follow. If all pairs match and no rank has blocks of different lengths, all blocks have one length.
PrimsTask Execution::exchange(Call call, const Exchange& given, PrimsTask::Run uneven) {
    constexpr int kRankBits = 20;  // no group has so many ranks that their sum of ones reaches the checksums
    if (const auto pinned = pins(call.collective)) call.by(pinned->text);
    const auto blocks = std::make_shared<const Exchange>(given);
    const bool is_even = blocks->is_even();
    const at::Tensor& like = first_defined(blocks->inputs, blocks->outputs);
    const std::uint64_t bytes = static_cast<std::uint64_t>(size_) * blocks->counts[0] * like.element_size();
    const SchedulePtr schedule = is_even ? schedule_for(call.collective, bytes, call.root) : nullptr;
    const std::uint64_t plan = Checksum().add(schedule ? schedule->name : "").value() << kRankBits;
    const Terms terms{difference_of_lengths(*blocks), is_even ? plan : 1};
    const Terms wanted{0, plan * static_cast<std::uint64_t>(size_)};
    return {call, [=, this, uneven = std::move(uneven)](const Call& call, Milliseconds timeout) {
                const bool moves = schedule && schedule->is_piggyback;
                const Terms found = moves ? agree_and_move_blocks(call, blocks->inputs, blocks->outputs, blocks->counts,
                                                                  timeout, terms, wanted)
                                          : agree(call, timeout, terms);
                if (moves && found == wanted) return;
                const auto [difference, plans] = found;
                if (difference != 0) compare_lengths(call, *blocks, timeout);
                const bool all_even = difference == 0 && plans % (std::uint64_t{1} << kRankBits) == 0;
                if (all_even && plans != wanted[1]) {
                    Call named = call;
                    named.by(schedule ? schedule->name : "");
                    agree(named, timeout);
                }
                if (!all_even || !schedule) return uneven(call, timeout);
                execute_on_blocks(*schedule, call, blocks->inputs, blocks->outputs, blocks->counts, timeout);
            }};
}

PrimsTask Execution::exchange_by(const SchedulePtr& schedule, Call call, const Exchange& given,
                                 const std::function<void()>& check) {
    call.by(schedule->name);
    const auto blocks = std::make_shared<const Exchange>(given);
    const Terms terms{difference_of_lengths(*blocks), 0};
    return {call, [=, this](const Call& call, Milliseconds timeout) {
                if (agree(call, timeout, terms)[0] != 0) {
                    compare_lengths(call, *blocks, timeout);
                    throw CommError(CommError::Kind::kMismatch,
                                    "rank " + std::to_string(rank_) +
                                        ": all_to_all: a rank expects a block of another length than is sent to it");
                }
                if (check) check();
                execute_on_blocks(*schedule, call, blocks->inputs, blocks->outputs, blocks->counts, timeout);
            }};
}

// A checksum of what this rank sends to each, minus one of what it expects from each. Summed over all ranks, modulo
// 2^64, it is 0 if all lengths agree: the sender's term of each block then cancels that of its receiver.
std::uint64_t Execution::difference_of_lengths(const Exchange& blocks) const {
    const auto mine = static_cast<std::uint64_t>(rank_);
    std::uint64_t difference = 0;
    for (std::uint64_t peer = 0; peer < blocks.outgoing.size(); ++peer) {
        const std::uint64_t sent = blocks.outgoing[peer], expected = blocks.incoming[peer];
        if (sent) difference += Checksum().add(mine).add(peer).add(sent).value();
        if (expected) difference -= Checksum().add(peer).add(mine).add(expected).value();
    }
    return difference;
}

BegunMessage Execution::begin_message(const UserMessage& message) {
    const auto& [data, bytes, owner] = message.memory;
    PointToPoint& p2p = host_segment_->p2p;
    const auto request = message.outgoing
                             ? p2p.send(message.peer, message.tag, data, bytes, message.timeout, message.done)
                             : p2p.receive(message.peer, message.tag, data, bytes, message.timeout, message.done);
    const auto wait = [host_segment = host_segment_, request](Milliseconds limit) {
        PointToPoint& p2p = host_segment->p2p;
        Membership& membership = host_segment->membership;
        if (p2p.wait(request, limit)) return;
        try {
            LongWait waiting(membership.wait_graph());
            do {
                waiting.published.set(p2p.wait_for(request));
                if (p2p.wait(request, kBetweenDiagnoses)) return;
            } while (!membership.is_final(waiting.diagnosis, {p2p.wait_for(request)}, limit));
            membership.throw_timeout(std::to_string(limit.count()) + " ms in the wait for " + p2p.text(*request),
                                     waiting.diagnosis.verdict());
        } catch (const CommError&) {
            p2p.wait(request, Milliseconds::max());  // it ends at its next check for failures
            throw;
        }
    };
    const auto source = [host_segment = host_segment_, request] {
        return request->peer < 0 ? request->peer : host_segment->membership.number(request->peer);
    };
    return {wait, source};
}

void Execution::pin(Collective collective, const std::string& text, MakePins make) {
    const auto place = static_cast<std::size_t>(collective);
    auto made = make ? std::make_shared<Pins>(Pins{text, std::move(make), {}}) : nullptr;
    const std::lock_guard lock(pins_guard_);
    has_pins_[place] = made != nullptr;
    std::swap(pins_[place], made);
}

std::shared_ptr<Execution::Pins> Execution::pins(Collective collective) {
    if (!has_pins(collective)) return nullptr;
    const std::lock_guard lock(pins_guard_);
    return pins_[static_cast<std::size_t>(collective)];
}

// Python makes the schedules, without the lock: a signal handler may run there and need a schedule.
SchedulePtr Execution::pinned(Collective collective, std::uint64_t bytes, int root) {
    const auto found = pins(collective);
    if (!found) return nullptr;
    {
        const std::lock_guard lock(pins_guard_);
        if (const auto known = found->by_root.find(root); known != found->by_root.end())
            return find(known->second, bytes);
    }
    std::vector<SchedulePtr> made;
    for (NativeSchedule& each : found->make(root))
        made.push_back(std::make_shared<const NativeSchedule>(std::move(each)));
    const std::lock_guard lock(pins_guard_);
    return find(found->by_root.try_emplace(root, std::move(made)).first->second, bytes);
}

SchedulePtr Execution::find(const std::vector<SchedulePtr>& schedules, std::uint64_t bytes) {
    const auto found = std::find_if(schedules.begin(), schedules.end(),
                                    [&](const auto& each) { return each->low <= bytes && bytes < each->high; });
    return found == schedules.end() ? nullptr : *found;
}

PrimsTask Execution::by_schedule(const SchedulePtr& schedule, Call call, const Tensors& inputs, const Tensors& outputs,
                                 const Counts& counts, const std::function<void()>& check) {
    call.by(schedule->name);
    if (schedule->is_piggyback) {
        return {call, [=, this](const Call& call, Milliseconds timeout) {
                    agree_and_move_blocks(call, inputs, outputs, counts, timeout);
                }};
    }
    return {call, [=, this](const Call& call, Milliseconds timeout) {
                agree(call, timeout);
                if (check) check();
                execute_on_blocks(*schedule, call, inputs, outputs, counts, timeout);
            }};
}

ProgramBuffer whole(const at::Tensor& tensor) {
    return ProgramBuffer::whole(bytes_of(tensor), static_cast<std::size_t>(tensor.numel()),
                                std::make_shared<const at::Tensor>(tensor));
}

ProgramBuffer in_blocks(const Tensors& inputs, const Tensors& outputs, const Counts& counts) {
    ProgramBuffer buffer;
    for (std::size_t block = 0; block < counts.size(); ++block) {
        const auto address = [&](const at::Tensor& each) { return each.defined() ? bytes_of(each) : nullptr; };
        buffer.blocks.push_back({address(inputs[block]), address(outputs[block]), counts[block]});
    }
    buffer.owner = std::make_shared<const std::pair<Tensors, Tensors>>(inputs, outputs);
    return buffer;
}

namespace {

// Runs `move` on blocks in packed memory, in place of those that are not packed.
template <typename Move>
void on_packed_blocks(const Tensors& inputs, const Tensors& outputs, const Counts& counts, const Move& move) {
    Tensors from = inputs, to = outputs;
    for (at::Tensor& each : from) {
        if (each.defined()) each = packed(each);
    }
    for (at::Tensor& each : to) {
        if (each.defined() && !is_packed(each)) each = at::empty(each.sizes(), each.options());
    }
    if (!move(in_blocks(from, to, counts))) return;
    for (std::size_t block = 0; block < to.size(); ++block) {
        if (!to[block].is_same(outputs[block])) outputs[block].copy_(to[block]);
    }
}

}  // namespace

void Execution::execute_on_blocks(const NativeSchedule& schedule, const Call& call, const Tensors& inputs,
                                  const Tensors& outputs, const Counts& counts, Milliseconds timeout) {
    on_packed_blocks(inputs, outputs, counts, [&](const ProgramBuffer& buffer) {
        execute_schedule(schedule, call, buffer, timeout);
        return true;
    });
}

Terms Execution::agree_and_move_blocks(const Call& call, const Tensors& inputs, const Tensors& outputs,
                                       const Counts& counts, Milliseconds timeout, const Terms& terms,
                                       const Terms& wanted) {
    Terms found{};
    on_packed_blocks(inputs, outputs, counts, [&](const ProgramBuffer& buffer) {
        found = agree_and_move(call, buffer, timeout, terms, wanted);
        return found == wanted;
    });
    return found;
}

}  // namespace dist_prims
