// Collectives by schedules: those of groups that span hosts, and an all_reduce with a pinned schedule.
#include <algorithm>
#include <cstring>
#include <future>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "backend.h"

namespace dist_prims {
namespace {

// The first tensor that this rank has; there is one.
const at::Tensor& defined_of(const Tensors& inputs, const Tensors& outputs) {
    for (const Tensors* each : {&inputs, &outputs}) {
        const auto found = std::find_if(each->begin(), each->end(), [](const auto& one) { return one.defined(); });
        if (found != each->end()) return *found;
    }
    throw std::invalid_argument("a collective needs a tensor");
}

}  // namespace

void PrimsBackend::pin(std::vector<NativeSchedule> schedules) {
    const std::lock_guard lock(schedules_guard_);
    pins_.clear();
    for (NativeSchedule& each : schedules) pins_.push_back(std::make_shared<const NativeSchedule>(std::move(each)));
}

std::string PrimsBackend::algorithm(std::uint64_t bytes) {
    const SchedulePtr found = schedule_for(Collective::kAllReduce, bytes);
    return found ? found->name : "";
}

// The schedule for data of `bytes`; null if the slot exchange of one host does it. Python chooses it, without the lock:
// a signal handler may run there and make a call that needs a schedule.
PrimsBackend::SchedulePtr PrimsBackend::schedule_for(Collective collective, std::uint64_t bytes, int root) {
    if (const SchedulePtr known = known_schedule(collective, bytes, root); known || !multi_host_) return known;
    const auto made = std::make_shared<const NativeSchedule>(setup_.choose(name_of(collective), bytes, root));
    if (const SchedulePtr known = known_schedule(collective, bytes, root)) return known;
    const std::lock_guard lock(schedules_guard_);
    return chosen_[{collective, root}].emplace_back(made);
}

PrimsBackend::SchedulePtr PrimsBackend::known_schedule(Collective collective, std::uint64_t bytes, int root) {
    const std::lock_guard lock(schedules_guard_);
    const auto& chosen = chosen_[{collective, root}];
    for (const auto* known : {collective == Collective::kAllReduce ? &pins_ : &chosen, &chosen}) {
        for (const SchedulePtr& each : *known) {
            if (each->low <= bytes && bytes < each->high) return each;
        }
    }
    return nullptr;
}

// Return when all ranks are about to make this call; raise Mismatch on all of them if one is not.
void PrimsBackend::agree(const Call& call, Milliseconds timeout) {
    if (multi_host_) return multi_host_->agree(call, timeout);
    host_segment_->slots.open(call, timeout);
    dist_prims::barrier(host_segment_->slots);
}

// The engine's own barrier, on a thread: its waits run no signal handlers and do not notice the end of the group.
void PrimsBackend::monitored_barrier_multi_host(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
    constexpr Milliseconds kBetweenLooks{20};
    std::packaged_task<void()> barrier(
        [engine = setup_.engine, opts, wait_all_ranks] { engine->monitoredBarrier(opts, wait_all_ranks); });
    std::future<void> ended = barrier.get_future();
    std::thread(std::move(barrier)).detach();  // it has all that it uses
    try {
        while (ended.wait_for(kBetweenLooks) != std::future_status::ready)
            host_segment_->membership.check_failures([](int) { return false; },
                                                     [] { return std::string("monitored_barrier"); });
        ended.get();
    } catch (...) {
        multi_host_->remote.end();  // also ends the barrier on its thread
        throw;
    }
}

void PrimsBackend::execute_schedule(const NativeSchedule& schedule, const Call& call, const at::Tensor& data,
                                    Milliseconds timeout, const Counts& blocks) {
    const ProgramBuffer buffer{bytes_of(data), call.count, blocks, std::make_shared<const at::Tensor>(data)};
    execute(schedule.program, multi_host_ ? multi_host_->router : *router_, call.dtype, call.op, buffer,
            schedule.segments, timeout);
}

// `inputs` and `outputs`: contiguous or not, by block; undefined where this rank has none. `counts`: elements of each.
void PrimsBackend::execute_schedule_on_blocks(const NativeSchedule& schedule, const Call& call, const Tensors& inputs,
                                              const Tensors& outputs, const Counts& counts, Milliseconds timeout) {
    const bool is_whole = counts.size() == 1;
    const bool is_in_place = is_whole && outputs[0].defined() && packed(outputs[0]).is_same(outputs[0]);
    const at::Tensor& like = defined_of(inputs, outputs);
    const at::Tensor data =
        is_in_place ? outputs[0].view(-1) : at::empty({static_cast<int64_t>(call.count)}, like.options());
    const Tensors parts = data.split_with_sizes(std::vector<int64_t>(counts.begin(), counts.end()));
    for (std::size_t block = 0; block < parts.size(); ++block) {
        const at::Tensor& input = inputs[block];
        if (input.defined() && input.data_ptr() != parts[block].data_ptr())
            parts[block].copy_(input.contiguous().view(-1));
    }
    execute_schedule(schedule, call, data, timeout, is_whole ? Counts{} : counts);
    for (std::size_t block = 0; block < parts.size() && !is_in_place; ++block) {
        if (outputs[block].defined()) outputs[block].copy_(parts[block].view_as(outputs[block]));
    }
}

// A collective by a schedule that its caller has named.
WorkPtr PrimsBackend::run_schedule(const ScheduledCall& given, bool async) {
    static const std::map<Collective, std::pair<c10d::OpType, const char*>> kTitles = {
        {Collective::kAllReduce, {c10d::OpType::ALLREDUCE, "dist_prims:all_reduce"}},
        {Collective::kReduceScatter, {c10d::OpType::REDUCE_SCATTER, "dist_prims:reduce_scatter"}},
        {Collective::kAllGather, {c10d::OpType::ALLGATHER, "dist_prims:all_gather"}},
        {Collective::kBroadcast, {c10d::OpType::BROADCAST, "dist_prims:broadcast"}},
        {Collective::kReduce, {c10d::OpType::REDUCE, "dist_prims:reduce"}}};
    const auto& [type, title] = kTitles.at(given.collective);
    const at::Tensor& like = defined_of(given.inputs, given.outputs);
    const std::size_t count = std::accumulate(given.counts.begin(), given.counts.end(), std::size_t{0});
    Task task{call_of(given.collective, like, count), {}};
    if (given.reduces) task.call.op = checked(name_of(given.collective), given.op, like);
    if (given.counts.size() > 1) task.call.layout = checksum(given.counts);
    task.call.root = given.root;
    task.call.by(given.schedule->name);
    task.run_scheduled = [given, this](const Call& call, Milliseconds timeout) {
        agree(call, timeout);
        if (given.check) given.check();
        execute_schedule_on_blocks(*given.schedule, call, given.inputs, given.outputs, given.counts, timeout);
    };
    return perform(alone(std::move(task)), {type, title, options_->timeout, async}, {like});
}

// Every rank sends each its block, all at once.
void PrimsBackend::exchange(const Call& call, const Blocks& in, const Counts& outgoing, const Places& out,
                            const Counts& incoming, Milliseconds timeout, const Transport::Owner& owner) {
    agree(call, timeout);
    compare_lengths(call, outgoing, incoming, timeout);
    Router& router = multi_host_->router;
    const std::uint64_t number = router.next();
    std::vector<Router::RoutedRequest> requests;
    try {
        for (int step = 1; step < size_; ++step) {  // no rank is the first that all send to
            const int to = (rank_ + step) % size_, from = (rank_ + size_ - step) % size_;
            const auto sent = static_cast<std::size_t>(to), got = static_cast<std::size_t>(from);
            if (incoming[got])
                requests.push_back(router.receive(from, number, out[got], incoming[got], timeout, owner));
            if (outgoing[sent]) requests.push_back(router.send(to, number, in[sent], outgoing[sent], timeout, owner));
        }
        router.wait(requests);
    } catch (...) {
        router.end();
        throw;
    }
    const auto own = static_cast<std::size_t>(rank_);
    if (outgoing[own] && out[own] != in[own]) std::memcpy(out[own], in[own], outgoing[own]);
}

// All ranks learn how much each sends to whom and expects from whom, and raise Mismatch where the two differ.
void PrimsBackend::compare_lengths(const Call& call, const Counts& outgoing, const Counts& incoming,
                                   Milliseconds timeout) {
    const auto size = static_cast<std::size_t>(size_), row = 2 * size;
    const at::Tensor tensor = at::zeros({static_cast<int64_t>(size * row)}, at::kLong);
    auto* const lists = reinterpret_cast<std::uint64_t*>(tensor.data_ptr<int64_t>());
    std::uint64_t* const mine = lists + static_cast<std::size_t>(rank_) * row;
    std::copy(incoming.begin(), incoming.end(), std::copy(outgoing.begin(), outgoing.end(), mine));
    const SchedulePtr schedule = schedule_for(Collective::kAllGather, tensor.nbytes());
    Call lengths;
    lengths.dtype = DType::kUInt64;
    lengths.count = size * row;
    execute_schedule(*schedule, lengths, tensor, timeout, Counts(size, row));
    for (std::size_t from = 0; from < size; ++from) {
        for (std::size_t to = 0; to < size; ++to)
            must_match(rank_, name_of(call.collective), static_cast<int>(from), lists[from * row + to],
                       static_cast<int>(to), lists[to * row + size + from]);
    }
}

}  // namespace dist_prims
