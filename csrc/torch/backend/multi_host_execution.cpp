// Collectives of a group that spans hosts: schedules, or an exchange in which every rank sends each its block.
#include <algorithm>
#include <cstring>
#include <future>
#include <map>
#include <thread>
#include <tuple>

#include "../../common/checksum.h"
#include "../../shm/collectives.h"
#include "execution.h"

namespace dist_prims {
namespace {

// The owner that a transport keeps while it still needs the memory; see net/transport.h.
template <typename... Kept>
Transport::Owner owner_of(const Kept&... kept) {
    return std::make_shared<const std::tuple<Kept...>>(kept...);
}

class MultiHostExecution : public Execution {
public:
    MultiHostExecution(std::shared_ptr<HostSegment> host_segment, int rank, int size, Hosts hosts,
                       c10::intrusive_ptr<c10d::Backend> engine, std::unique_ptr<Transport> transport,
                       ChooseSchedule choose)
        : Execution(std::move(host_segment), rank, size),
          engine_(std::move(engine)),
          choose_(std::move(choose)),
          group_(std::move(hosts), *host_segment_, std::move(transport)) {}

    void agree(const Call& call, Milliseconds timeout) override { group_.agree(call, timeout); }
    LinkCosts begin(const Call& call, std::uint64_t network, Milliseconds timeout) override {
        return group_.begin(call, network, timeout);
    }
    PrimsTask all_reduce(Call call, const at::Tensor& input, const at::Tensor& tensor) override {
        if (!group_.is_small(call.count * size_of(call.dtype)))
            return by_chosen_schedule(call, {input}, {tensor}, {call.count});
        return {call, [this, input, output = Output(tensor)](const Call& call, Milliseconds timeout) {
                    group_.all_reduce(call, bytes_of(input), output.data(), timeout);
                    output.deliver();
                }};
    }
    PrimsTask broadcast(Call call, const at::Tensor& tensor) override {
        const SchedulePtr schedule = schedule_for(call.collective, tensor.nbytes(), call.root);
        call.by(schedule->name);
        return {call, [this, schedule, output = Output(tensor)](const Call& call, Milliseconds timeout) {
                    agree(call, timeout);
                    execute_schedule(*schedule, call, whole(output.flat), timeout);
                    if (rank_ != call.root) output.deliver();
                }};
    }
    PrimsTask reduce(Call call, const at::Tensor& input, const at::Tensor& output) override {
        return by_chosen_schedule(call, {input}, {rank_ == call.root ? output : at::Tensor()}, {call.count});
    }
    PrimsTask all_gather(Call call, const at::Tensor& input, const Tensors& outputs) override {
        Tensors inputs(outputs.size());
        inputs[static_cast<std::size_t>(rank_)] = input;
        return by_chosen_schedule(call, inputs, outputs, elements(outputs));
    }
    PrimsTask reduce_scatter(Call call, const Tensors& inputs, const at::Tensor& output) override {
        Tensors outputs(inputs.size());
        outputs[static_cast<std::size_t>(rank_)] = output;
        return by_chosen_schedule(call, inputs, outputs, elements(inputs));
    }
    PrimsTask all_to_all(Call call, const Tensors& inputs, const Tensors& tensors) override {
        return {call, [this, inputs, outputs = Outputs(tensors), outgoing = lengths(inputs),
                       incoming = lengths(tensors)](const Call& call, Milliseconds timeout) {
                    exchange(call, blocks_of(inputs), outgoing, outputs.places(), incoming, timeout,
                             owner_of(inputs, outputs));
                    outputs.deliver();
                }};
    }
    PrimsTask gather(Call call, const at::Tensor& input, const Tensors& tensors) override {
        return {call, [this, input, outputs = Outputs(tensors), incoming = lengths(tensors)](const Call& call,
                                                                                             Milliseconds timeout) {
                    const auto size = static_cast<std::size_t>(size_), to = static_cast<std::size_t>(call.root);
                    Blocks in(size);
                    Counts outgoing(size);
                    in[to] = bytes_of(input);
                    outgoing[to] = input.nbytes();
                    const bool is_root = rank_ == call.root;
                    exchange(call, in, outgoing, is_root ? outputs.places() : Places(size),
                             is_root ? incoming : Counts(size), timeout, owner_of(input, outputs));
                    outputs.deliver();
                }};
    }
    PrimsTask scatter(Call call, const Tensors& inputs, const at::Tensor& tensor) override {
        return {call, [this, inputs, output = Output(tensor)](const Call& call, Milliseconds timeout) {
                    const auto size = static_cast<std::size_t>(size_), from = static_cast<std::size_t>(call.root);
                    Counts incoming(size);
                    Places out(size);
                    incoming[from] = output.flat.nbytes();
                    out[from] = output.data();
                    const bool is_root = rank_ == call.root;
                    exchange(call, is_root ? blocks_of(inputs) : Blocks(size), is_root ? lengths(inputs) : Counts(size),
                             out, incoming, timeout, owner_of(inputs, output));
                    output.deliver();
                }};
    }
    // The engine's own barrier, on a thread: its waits run no signal handlers and do not notice the group's end.
    void monitored_barrier(Milliseconds limit, bool wait_all_ranks) override {
        constexpr Milliseconds kBetweenLooks{20};
        c10d::BarrierOptions options;
        options.timeout = limit;
        std::packaged_task<void()> barrier(
            [engine = engine_, options, wait_all_ranks] { engine->monitoredBarrier(options, wait_all_ranks); });
        std::future<void> ended = barrier.get_future();
        std::thread(std::move(barrier)).detach();  // it has all that it uses
        try {
            while (ended.wait_for(kBetweenLooks) != std::future_status::ready)
                host_segment_->membership.check_failures([](int) { return false; },
                                                         [] { return std::string("monitored_barrier"); });
            ended.get();
        } catch (...) {
            group_.remote.end();  // also ends the barrier on its thread
            throw;
        }
    }

    // Python chooses the schedule, without the lock: a signal handler may run there and need a schedule.
    SchedulePtr schedule_for(Collective collective, std::uint64_t bytes, int root = -1) override {
        if (const SchedulePtr known = known_schedule(collective, bytes, root)) return known;
        const auto made = std::make_shared<const NativeSchedule>(choose_(name_of(collective), bytes, root));
        if (const SchedulePtr known = known_schedule(collective, bytes, root)) return known;
        const std::lock_guard lock(chosen_guard_);
        return chosen_[{collective, root}].emplace_back(made);
    }

    bool spans_hosts() const override { return true; }
    // The engine also carries messages between ranks of one host: a receive from any rank cannot be posted in two
    // places.
    c10d::Backend* carrier(int tag) override {
        const int largest = group_.remote.tags.largest_of_users();
        TORCH_CHECK_VALUE(tag >= 0 && tag <= largest, "rank ", rank_, ": tag ", tag,
                          " of a message in a group that spans hosts; the engine between them is ",
                          engine_->getBackendName(), ", and its tags for messages lie between 0 and ", largest);
        return engine_.get();
    }
    void wake() override { group_.remote.wake(); }
    void forward_notice() override {
        if (host_segment_->membership.notice()) group_.remote.end();
    }
    void forward_leave() override {
        host_segment_->membership.give_notice(CommError::Kind::kPeerLeft, rank_);
        group_.remote.end();
    }

private:
    Router& router() override { return group_.router; }
    SchedulePtr known_schedule(Collective collective, std::uint64_t bytes, int root) {
        const SchedulePtr pin = collective == Collective::kAllReduce ? pinned(bytes) : nullptr;
        if (pin) return pin;
        const std::lock_guard lock(chosen_guard_);
        return find(chosen_[{collective, root}], bytes);
    }
    PrimsTask by_chosen_schedule(const Call& call, const Tensors& inputs, const Tensors& outputs,
                                 const Counts& counts) {
        return by_schedule(schedule_for(call.collective, call.count * size_of(call.dtype), call.root), call, inputs,
                           outputs, counts);
    }
    // Every rank sends each its block, all at once.
    void exchange(const Call& call, const Blocks& in, const Counts& outgoing, const Places& out, const Counts& incoming,
                  Milliseconds timeout, const Transport::Owner& owner) {
        if (group_.agree(call, timeout, difference_of_lengths(outgoing, incoming)) != 0)
            compare_lengths(call, outgoing, incoming, timeout);
        Router& router = group_.router;
        const std::uint64_t number = router.next();
        std::vector<Router::RoutedRequest> requests;
        try {
            for (int step = 1; step < size_; ++step) {  // no rank is the first that all send to
                const int to = (rank_ + step) % size_, from = (rank_ + size_ - step) % size_;
                const auto sent = static_cast<std::size_t>(to), got = static_cast<std::size_t>(from);
                if (incoming[got])
                    requests.push_back(router.receive(from, number, out[got], incoming[got], timeout, owner));
                if (outgoing[sent])
                    requests.push_back(router.send(to, number, in[sent], outgoing[sent], timeout, owner));
            }
            router.wait(requests);
        } catch (...) {
            router.end();
            throw;
        }
        const auto own = static_cast<std::size_t>(rank_);
        if (outgoing[own] && out[own] != in[own]) std::memcpy(out[own], in[own], outgoing[own]);
    }
    // A checksum of what this rank sends to each, minus one of what it expects from each. Summed over all ranks, modulo
    // 2^64, it is 0 if all lengths agree: the sender's term of each block then cancels that of its receiver.
    std::uint64_t difference_of_lengths(const Counts& outgoing, const Counts& incoming) const {
        const auto mine = static_cast<std::uint64_t>(rank_);
        std::uint64_t difference = 0;
        for (std::uint64_t peer = 0; peer < outgoing.size(); ++peer) {
            if (outgoing[peer]) difference += Checksum().add(mine).add(peer).add(outgoing[peer]).value();
            if (incoming[peer]) difference -= Checksum().add(peer).add(mine).add(incoming[peer]).value();
        }
        return difference;
    }
    // All ranks learn how much each sends to each and expects from each, and throw Mismatch where the two differ.
    void compare_lengths(const Call& call, const Counts& outgoing, const Counts& incoming, Milliseconds timeout) {
        const auto size = static_cast<std::size_t>(size_), row = 2 * size;
        const at::Tensor tensor = at::zeros({static_cast<int64_t>(size * row)}, at::kLong);
        auto* const lists = reinterpret_cast<std::uint64_t*>(tensor.data_ptr<int64_t>());
        std::uint64_t* const mine = lists + static_cast<std::size_t>(rank_) * row;
        std::copy(incoming.begin(), incoming.end(), std::copy(outgoing.begin(), outgoing.end(), mine));
        const SchedulePtr schedule = schedule_for(Collective::kAllGather, tensor.nbytes());
        Call lengths;
        lengths.dtype = DType::kUInt64;
        lengths.count = size * row;
        const Tensors rows = tensor.split(static_cast<int64_t>(row));
        execute_schedule(*schedule, lengths, in_blocks(rows, rows, Counts(size, row)), timeout);
        for (std::size_t from = 0; from < size; ++from) {
            for (std::size_t to = 0; to < size; ++to)
                must_match(rank_, name_of(call.collective), static_cast<int>(from), lists[from * row + to],
                           static_cast<int>(to), lists[to * row + size + from]);
        }
    }

    const c10::intrusive_ptr<c10d::Backend> engine_;
    const ChooseSchedule choose_;
    MultiHostGroup group_;
    std::mutex chosen_guard_;
    std::map<std::pair<Collective, int>, std::vector<SchedulePtr>> chosen_;  // by collective and root
};

}  // namespace

std::shared_ptr<Execution> make_multi_host_execution(std::shared_ptr<HostSegment> host_segment, int rank, int size,
                                                     Hosts hosts, c10::intrusive_ptr<c10d::Backend> engine,
                                                     std::unique_ptr<Transport> transport, ChooseSchedule choose) {
    return std::make_shared<MultiHostExecution>(std::move(host_segment), rank, size, std::move(hosts),
                                                std::move(engine), std::move(transport), std::move(choose));
}

}  // namespace dist_prims
