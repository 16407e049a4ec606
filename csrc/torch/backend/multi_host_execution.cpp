// The calls of a group that spans hosts. A collective runs by a schedule or, if that takes less time, as a piggyback:
// its data travels in the messages of the agreement (net/piggyback.h). A message goes through shared memory if its peer
// is on this host, and otherwise through the transport.
#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

#include "../../net/monitored_barrier.h"
#include "../../shm/collectives.h"
#include "execution.h"

namespace dist_prims {
namespace {

class MultiHostExecution : public Execution {
public:
    MultiHostExecution(std::shared_ptr<HostSegment> host_segment, int rank, int size, Hosts hosts,
                       std::unique_ptr<Transport> transport, ChooseSchedule choose)
        : Execution(std::move(host_segment), rank, size),
          choose_(std::move(choose)),
          local_ranks_(hosts.local_ranks()),
          group_(std::move(hosts), *host_segment_, std::move(transport)),
          messages_(std::make_shared<UserMessages>(group_.remote, host_segment_->p2p, host_segment_->membership)) {}

    using Execution::agree;
    Terms agree(const Call& call, Milliseconds timeout, const Terms& terms) override {
        return group_.agree(call, timeout, terms);
    }
    LinkCosts first_agreement(const Call& call, std::uint64_t network, Milliseconds timeout) override {
        return group_.first_agreement(call, network, timeout);
    }
    void monitored_barrier(Milliseconds limit, bool wait_all_ranks) override {
        try {
            dist_prims::monitored_barrier(group_.remote, host_segment_->p2p, local_ranks_, rank_, limit,
                                          wait_all_ranks);
        } catch (...) {
            group_.remote.end();
            throw;
        }
    }

    SchedulePtr schedule_for(Collective collective, std::uint64_t bytes, int root) override {
        if (const SchedulePtr pin = pinned_schedule(collective, bytes, root)) return pin;
        if (group_.is_small(collective, bytes)) return piggyback_;
        const SchedulePtr schedule = chosen(collective, bytes, root, true);
        return schedule->is_slower_than_piggyback && group_.can_carry(collective, bytes) ? piggyback_ : schedule;
    }

    bool spans_hosts() const override { return true; }
    void check_tag(int tag) const override {
        const int largest = group_.remote.tags.largest_of_users();
        TORCH_CHECK_VALUE(tag >= 0 && tag <= largest, "rank ", rank_, ": tag ", tag,
                          " is out of range: in a group that spans hosts, messages have tags from 0 to ", largest,
                          "; the group reserves the larger tags");
    }
    StartedMessage start_message(const UserMessage& message) override {
        // 1. A peer on this host: shared memory. A transport without claims carries all messages, and a receive from
        // any rank is posted in both places; see UserMessages.
        const bool is_remote = message.peer == PointToPoint::kAnyone || !group_.remote.has_claims();
        const int local_rank = is_remote ? -1 : local_ranks_[static_cast<std::size_t>(message.peer)];
        if (local_rank >= 0) {
            UserMessage local = message;
            local.peer = local_rank;
            local.timeout += RemotePeers::kLocalMargin;
            return Execution::start_message(local);
        }
        // 2. Any other peer.
        const int tag = static_cast<int>(message.tag);
        const auto request = message.outgoing
                                 ? messages_->send(message.peer, tag, message.memory, message.timeout, message.done)
                                 : messages_->receive(message.peer, tag, message.memory, message.timeout, message.done);
        const auto wait = [self = shared_from_this(), messages = messages_, request](Milliseconds limit) {
            messages->wait(request, limit);
        };
        return {wait, [messages = messages_, request] { return messages->source(*request); }};
    }
    void close_messages(const std::exception_ptr& reason) override {
        messages_->close(reason);
        wake();
    }
    void wake() override { group_.remote.wake(); }
    void forward_notice() override {
        if (host_segment_->membership.notice()) group_.remote.end();
    }
    void end_on_all_hosts() override {
        host_segment_->membership.give_notice({CommError::Kind::kPeerLeft, rank_});
        group_.remote.end();
    }
    std::vector<std::pair<int, int>> cut_links() override { return group_.remote.cut_links(); }
    void leave() override { group_.remote.leave(); }

private:
    using Key = std::tuple<Collective, int, bool>;  // of a schedule: the collective, the root, whether for even blocks

    Router& router() override { return group_.router; }
    Terms agree_and_move(const Call& call, const ProgramBuffer& buffer, Milliseconds timeout, const Terms& terms,
                         const Terms& wanted) override {
        return group_.agree_and_move(call, buffer, timeout, terms, wanted);
    }
    // The schedule that Python chooses for a size, or has chosen before. Python is called without the lock: a signal
    // handler may run there, need a schedule, and be the first to keep it.
    SchedulePtr chosen(Collective collective, std::uint64_t bytes, int root, bool is_even) {
        const Key key{collective, root, is_even};
        if (const SchedulePtr known = known_schedule(key, bytes)) return known;
        const auto choice = std::make_shared<const NativeSchedule>(choose_(name_of(collective), bytes, root, is_even));
        if (const SchedulePtr known = known_schedule(key, bytes)) return known;
        const std::lock_guard lock(chosen_guard_);
        return chosen_[key].emplace_back(choice);
    }
    SchedulePtr known_schedule(const Key& key, std::uint64_t bytes) {
        const std::lock_guard lock(chosen_guard_);
        return schedule_for_size(chosen_[key], bytes);
    }
    // Each rank chooses by its own lengths, so the ranks may choose different schedules. That does not matter: in each
    // of them a rank sends every block directly to its receiver, and only the order differs.
    SchedulePtr schedule_for_uneven(const CollectiveCall& call) override {
        const BlockLengths lengths = block_lengths(call);
        const auto bytes = std::max(sum_of(lengths.outgoing), sum_of(lengths.incoming));
        try {
            return chosen(call.announced.collective, bytes, call.announced.root, false);
        } catch (...) {  // a signal handler has thrown, and the other ranks have begun the call
            host_segment_->membership.give_notice({CommError::Kind::kInterrupted, rank_});
            throw;
        }
    }
    // Between hosts, only a barrier has no schedule. The agreement of all ranks is a barrier.
    void run_by_slots(const CollectiveCall& call, Milliseconds timeout) override { agree(call.announced, timeout, {}); }
    // Gathers the lengths of all ranks on every rank. Row r of `tensor`: what rank r sends to each rank, followed by
    // what it expects from each rank.
    void compare_lengths(const CollectiveCall& call, const BlockLengths& exchanged, Milliseconds timeout) override {
        const auto size = static_cast<std::size_t>(size_), row = 2 * size;
        const at::Tensor tensor = at::zeros({static_cast<int64_t>(size * row)}, at::kLong);
        auto* const lists = reinterpret_cast<std::uint64_t*>(tensor.data_ptr<int64_t>());
        std::uint64_t* const own_row = lists + static_cast<std::size_t>(rank_) * row;
        std::copy(exchanged.incoming.begin(), exchanged.incoming.end(),
                  std::copy(exchanged.outgoing.begin(), exchanged.outgoing.end(), own_row));
        const SchedulePtr schedule = chosen(Collective::kAllGather, tensor.nbytes(), -1, true);
        const Tensors rows = tensor.split(static_cast<int64_t>(row));
        execute(schedule->program, group_.router, DType::kUInt64, Op::kNone,
                program_buffer(rows, rows, Counts(size, row)), schedule->segments, timeout);
        for (std::size_t from = 0; from < size; ++from) {
            for (std::size_t to = 0; to < size; ++to)
                must_match(rank_, name_of(call.announced.collective), static_cast<int>(from), lists[from * row + to],
                           static_cast<int>(to), lists[to * row + size + from]);
        }
    }

    const ChooseSchedule choose_;
    const std::vector<int> local_ranks_;  // by rank of the group: the rank on this host, or -1
    MultiHostGroup group_;
    const std::shared_ptr<UserMessages> messages_;
    const SchedulePtr piggyback_ = std::make_shared<const NativeSchedule>(
        NativeSchedule{.low = 0, .high = UINT64_MAX, .name = "piggyback", .is_piggyback = true});
    std::mutex chosen_guard_;
    std::map<Key, std::vector<SchedulePtr>> chosen_;
};

}  // namespace

std::shared_ptr<Execution> make_multi_host_execution(std::shared_ptr<HostSegment> host_segment, int rank, int size,
                                                     Hosts hosts, std::unique_ptr<Transport> transport,
                                                     ChooseSchedule choose) {
    return std::make_shared<MultiHostExecution>(std::move(host_segment), rank, size, std::move(hosts),
                                                std::move(transport), std::move(choose));
}

}  // namespace dist_prims
