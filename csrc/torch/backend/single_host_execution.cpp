// The calls of a group whose ranks are all on one host. A collective runs in phases of the slot exchange
// (shm/collectives.h), or by the schedule that is pinned for its size.
#include <cstring>
#include <thread>
#include <tuple>

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
    void prepare(CollectiveCall& call) override {
        Execution::prepare(call);
        const bool is_in_place = call.announced.collective == Collective::kAllReduce && !call.schedule &&
                                 call.inputs[0].is_same(call.outputs[0]);
        if (is_in_place)
            call.announced.tensor_ref = host_segment_->tensor_ref_of(bytes_of(call.inputs[0]), call.bytes());
    }
    // Rank 0 receives a message from every rank, and then releases all ranks by a message; or it names the late ranks.
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
        const auto send_to = [&](int to) {  // waits only while the ring buffer is full of unexpected messages
            const auto request = p2p.send(to, kTag, nothing, 0, limit + kRequestMargin, nullptr);
            if (p2p.wait(request, limit) && request->error) std::rethrow_exception(request->error);
        };
        // 1. Every rank sends to rank 0, which receives from each rank, or until the first late rank. The other ranks
        // wait for their release.
        if (rank_ != 0) send_to(0);
        for (int peer = rank_ == 0 ? 1 : 0; peer < (rank_ == 0 ? size_ : 1); ++peer) {
            if (late.empty() || wait_all_ranks) receive_from(peer);
        }
        // 2. Name the late ranks; on ranks other than 0 this is rank 0. If no rank is late, rank 0 releases the others.
        if (!late.empty()) give_up_monitored_barrier(late, limit);
        for (int peer = 1; rank_ == 0 && peer < size_; ++peer) send_to(peer);
    }

    SchedulePtr schedule_for(Collective collective, std::uint64_t bytes, int root) override {
        return pinned_schedule(collective, bytes, root);
    }
    bool reduces_in_place(const at::Tensor& tensor) override {
        const std::size_t bytes = tensor.nbytes();
        return host_segment_->tensor_ref_of(bytes_of(tensor), bytes).is_shared() &&
               !pinned_schedule(Collective::kAllReduce, bytes, -1);
    }

private:
    Router& router() override { return router_; }
    void run_by_slots(const CollectiveCall& call, Milliseconds timeout) override {
        const Call& announced = call.announced;
        const auto [dtype, op, root] = std::tuple(announced.dtype, announced.op, announced.root);
        const auto own = static_cast<std::size_t>(rank_);
        const auto input = [&](std::size_t block) { return address_of(call.inputs[block]); };
        const auto output = [&](std::size_t block) { return address_of(call.outputs[block]); };
        SlotExchange& slots = open(announced, timeout);
        switch (announced.collective) {
            case Collective::kAllReduce:
                return all_reduce(*host_segment_, dtype, op, input(0), output(0), announced.count,
                                  announced.tensor_ref);
            case Collective::kReduce:
                return reduce(*host_segment_, dtype, op, root, input(0), output(0), announced.count);
            case Collective::kBroadcast:
                return broadcast(slots, call.bytes(), root, rank_ == root ? input(0) : output(0));
            case Collective::kAllGather:
                return all_gather(slots, input(own), places_of(call.outputs), byte_counts(call.outputs));
            case Collective::kReduceScatter:
                return reduce_scatter(slots, dtype, op, blocks_of(call.inputs), output(own), call.counts);
            case Collective::kGather: {
                const BlockLengths exchanged = block_lengths(call);
                return gather(slots, root, input(own), call.inputs[own].nbytes(), places_of(call.outputs),
                              exchanged.incoming);
            }
            case Collective::kScatter:
                return scatter(slots, root, rank_ == root ? blocks_of(call.inputs) : Blocks{}, output(own),
                               call.outputs[own].nbytes());
            case Collective::kAllToAll: {  // the lists may have the blocks of a schedule; see CollectiveCall
                const Tensors sent(call.inputs.begin(), call.inputs.begin() + size_);
                const Tensors received(call.outputs.end() - size_, call.outputs.end());
                return all_to_all(slots, blocks_of(sent), byte_counts(sent), places_of(received),
                                  byte_counts(received));
            }
            case Collective::kBarrier:
                return slots.phase();
        }
    }
    SlotExchange& open(const Call& call, Milliseconds timeout) {
        host_segment_->slots.open(call, timeout);
        return host_segment_->slots;
    }
    void compare_lengths(const CollectiveCall& call, const BlockLengths&, Milliseconds timeout) override {
        run_by_slots(call, timeout);  // its first phase compares them
    }
    // Throws an error that names the ranks that have not come to the barrier, and the ranks that block them.
    [[noreturn]] void give_up_monitored_barrier(const std::vector<int>& late, Milliseconds limit) {
        Membership& membership = host_segment_->membership;
        WaitGraph::Waits waits;
        for (const int rank : late) waits.push_back({WaitGraph::WaitKind::kReceive, false, rank});
        LongWait waiting(membership.wait_graph());
        waiting.published.set(waits.front());
        while (!membership.is_final(waiting.diagnosis, waits, limit)) {
            std::this_thread::sleep_for(kBetweenDiagnoses);
            // Throw if the group has ended; is_final() looks after the late ranks.
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
