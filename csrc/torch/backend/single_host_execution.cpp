// Collectives of a group whose ranks are all on one host: phases of the slot exchange, or the schedule that is pinned
// for the size.
#include <cstring>
#include <thread>

#include "../../shm/collectives.h"
#include "execution.h"

namespace dist_prims {
namespace {

class SingleHostExecution : public Execution {
public:
    SingleHostExecution(std::shared_ptr<HostSegment> host_segment, int rank, int size)
        : Execution(std::move(host_segment), rank, size), router_(host_segment_->p2p, {}, nullptr) {}

    using Execution::agree;
    Terms agree(const Call& call, Milliseconds timeout, const Terms& terms) override {
        SlotExchange& slots = open(call, timeout);
        std::memcpy(slots.mine(), terms.data(), sizeof(terms));
        slots.phase();
        Terms sum{};
        for (int peer = 0; peer < size_; ++peer) {
            Terms theirs;
            std::memcpy(theirs.data(), slots.theirs(peer), sizeof(theirs));
            add(sum, theirs);
        }
        return sum;
    }
    PrimsTask all_reduce(Call call, const at::Tensor& input, const at::Tensor& tensor) override {
        if (schedule_for(call)) return Execution::all_reduce(call, input, tensor);
        const std::size_t bytes = call.count * size_of(call.dtype);
        if (input.is_same(tensor)) call.tensor_ref = host_segment_->tensor_ref_of(bytes_of(tensor), bytes);
        return {call, [this, input, output = Output(tensor)](const Call& call, Milliseconds timeout) {
                    open(call, timeout);
                    dist_prims::all_reduce(*host_segment_, call.dtype, call.op, bytes_of(input), output.data(),
                                           call.count, call.tensor_ref);
                    output.deliver();
                }};
    }
    PrimsTask broadcast(Call call, const at::Tensor& tensor) override {
        if (schedule_for(call)) return Execution::broadcast(call, tensor);
        return {call, [this, output = Output(tensor)](const Call& call, Milliseconds timeout) {
                    dist_prims::broadcast(open(call, timeout), output.flat.nbytes(), call.root, output.data());
                    if (rank_ != call.root) output.deliver();
                }};
    }
    PrimsTask reduce(Call call, const at::Tensor& input, const at::Tensor& tensor) override {
        if (schedule_for(call)) return Execution::reduce(call, input, tensor);
        return {call, [this, input, output = Output(tensor)](const Call& call, Milliseconds timeout) {
                    open(call, timeout);
                    dist_prims::reduce(*host_segment_, call.dtype, call.op, call.root, bytes_of(input), output.data(),
                                       call.count);
                    if (rank_ == call.root) output.deliver();
                }};
    }
    PrimsTask all_gather(Call call, const at::Tensor& input, const Tensors& tensors) override {
        if (schedule_for(call)) return Execution::all_gather(call, input, tensors);
        return {call, [this, input, outputs = Outputs(tensors), bytes = lengths(tensors)](const Call& call,
                                                                                          Milliseconds timeout) {
                    dist_prims::all_gather(open(call, timeout), bytes_of(input), outputs.places(), bytes);
                    outputs.deliver();
                }};
    }
    PrimsTask reduce_scatter(Call call, const Tensors& inputs, const at::Tensor& tensor) override {
        if (schedule_for(call)) return Execution::reduce_scatter(call, inputs, tensor);
        return {call, [this, inputs, output = Output(tensor), counts = elements(inputs)](const Call& call,
                                                                                         Milliseconds timeout) {
                    dist_prims::reduce_scatter(open(call, timeout), call.dtype, call.op, blocks_of(inputs),
                                               output.data(), counts);
                    output.deliver();
                }};
    }
    PrimsTask all_to_all(Call call, const Tensors& inputs, const Tensors& tensors) override {
        PrimsTask task{call, [this, inputs, outputs = Outputs(tensors), outgoing = lengths(inputs),
                              incoming = lengths(tensors)](const Call& call, Milliseconds timeout) {
                           dist_prims::all_to_all(open(call, timeout), blocks_of(inputs), outgoing, outputs.places(),
                                                  incoming);
                           outputs.deliver();
                       }};
        return has_pins(call.collective) ? exchange(call, all_to_all_blocks(inputs, tensors), task.run) : task;
    }
    PrimsTask gather(Call call, const at::Tensor& input, const Tensors& tensors) override {
        PrimsTask task{call, [this, input, outputs = Outputs(tensors), incoming = lengths(tensors)](
                                 const Call& call, Milliseconds timeout) {
                           dist_prims::gather(open(call, timeout), call.root, bytes_of(input), input.nbytes(),
                                              outputs.places(), incoming);
                           outputs.deliver();
                       }};
        return has_pins(call.collective) ? exchange(call, gather_blocks(call.root, input, tensors), task.run) : task;
    }
    PrimsTask scatter(Call call, const Tensors& inputs, const at::Tensor& tensor) override {
        if (schedule_for(call, static_cast<std::size_t>(size_))) return Execution::scatter(call, inputs, tensor);
        return {call, [this, inputs, output = Output(tensor)](const Call& call, Milliseconds timeout) {
                    dist_prims::scatter(open(call, timeout), call.root, blocks_of(inputs), output.data(),
                                        output.flat.nbytes());
                    output.deliver();
                }};
    }
    // Rank 0 receives a message from every rank, or names the ranks that sent none; then it releases them.
    void monitored_barrier(Milliseconds limit, bool wait_all_ranks) override {
        constexpr PointToPoint::Tag kTag = PointToPoint::kBarrierTag;
        constexpr Milliseconds kRequestMargin = std::chrono::hours(1);  // the barrier times out before its requests
        PointToPoint& p2p = host_segment_->p2p;
        const auto until = Clock::now() + limit;
        std::byte* const nothing = nullptr;
        std::vector<int> late;
        const auto receive_from = [&](int from) {
            const auto left = std::chrono::duration_cast<Milliseconds>(until - Clock::now());
            const auto request = p2p.receive(from, kTag, nothing, 0, limit + kRequestMargin, nullptr);
            if (!p2p.wait(request, std::max(left, Milliseconds(1))))
                late.push_back(from);
            else if (request->error)
                std::rethrow_exception(request->error);
        };
        const auto send_to = [&](int to) {  // at once, unless the ring is full of unexpected messages
            const auto request = p2p.send(to, kTag, nothing, 0, limit + kRequestMargin, nullptr);
            if (p2p.wait(request, limit) && request->error) std::rethrow_exception(request->error);
        };
        if (rank_ != 0) send_to(0);
        for (int peer = rank_ == 0 ? 1 : 0; peer < (rank_ == 0 ? size_ : 1); ++peer) {
            if (late.empty() || wait_all_ranks) receive_from(peer);
        }
        if (!late.empty()) give_up_monitored_barrier(late, limit);
        for (int peer = 1; rank_ == 0 && peer < size_; ++peer) send_to(peer);
    }

    using Execution::schedule_for;
    SchedulePtr schedule_for(Collective collective, std::uint64_t bytes, int root) override {
        return pinned(collective, bytes, root);
    }
    bool reduces_in_place(const at::Tensor& tensor) override {
        const std::size_t bytes = tensor.nbytes();
        return host_segment_->tensor_ref_of(bytes_of(tensor), bytes).is_shared() &&
               !pinned(Collective::kAllReduce, bytes, -1);
    }

private:
    Router& router() override { return router_; }
    SlotExchange& open(const Call& call, Milliseconds timeout) {
        host_segment_->slots.open(call, timeout);
        return host_segment_->slots;
    }
    // Names the ranks that have not come to the barrier, and the ranks that block them.
    [[noreturn]] void give_up_monitored_barrier(const std::vector<int>& late, Milliseconds limit) {
        Membership& membership = host_segment_->membership;
        WaitGraph::Waits waits;
        for (const int rank : late) waits.push_back({WaitGraph::WaitKind::kReceive, false, rank});
        LongWait waiting(membership.wait_graph());
        waiting.published.set(waits.front());
        while (!membership.is_final(waiting.diagnosis, waits, limit)) {
            std::this_thread::sleep_for(Milliseconds(10));
            membership.check_failures([](int) { return false; }, [] { return std::string("monitored_barrier"); });
        }
        membership.throw_timeout(c10::str(limit.count(), " ms in monitored_barrier: Rank ", rank_,
                                          " timed out in monitoredBarrier, no sign of rank ", c10::Join(", ", late)),
                                 waiting.diagnosis.verdict());
    }

    Router router_;  // for pinned schedules
};

}  // namespace

std::shared_ptr<Execution> make_single_host_execution(std::shared_ptr<HostSegment> host_segment, int rank, int size) {
    return std::make_shared<SingleHostExecution>(std::move(host_segment), rank, size);
}

}  // namespace dist_prims
