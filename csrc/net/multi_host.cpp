#include "multi_host.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "../common/kernels.h"
#include "../common/trace.h"

namespace dist_prims {

std::vector<int> Hosts::local_ranks() const {
    std::size_t size = 0;
    for (const auto& each : ranks) size += each.size();
    std::vector<int> found(size, -1);
    for (std::size_t local_rank = 0; local_rank < ranks[mine].size(); ++local_rank)
        found[static_cast<std::size_t>(ranks[mine][local_rank])] = static_cast<int>(local_rank);
    return found;
}

std::vector<int> Hosts::sizes() const {
    std::vector<int> found;
    for (const auto& each : ranks) found.push_back(static_cast<int>(each.size()));
    return found;
}

std::vector<int> Hosts::remote_ranks() const {
    std::vector<int> found;
    for (std::size_t host = 0; host < ranks.size(); ++host) {
        if (host != mine) found.insert(found.end(), ranks[host].begin(), ranks[host].end());
    }
    return found;
}

// What a leader contributes for its host: the call of its ranks, two calls if they differ, and the sum of their data.
struct MultiHostGroup::LeaderFrame {
    Call call, other;
    std::int32_t rank = -1, other_rank = -1;  // of these calls; -1: there is none
    alignas(kCacheLine) std::byte data[kSmall] = {};
};

static_assert(sizeof(Call) * 2 + 2048 < MultiHostGroup::kMinSlotBytes);

MultiHostGroup::MultiHostGroup(Hosts hosts, HostSegment& host_segment, std::unique_ptr<Transport> transport)
    : remote(std::move(transport), host_segment.membership, hosts.remote_ranks()),
      router(host_segment.p2p, hosts.local_ranks(), &remote),
      hosts_(std::move(hosts)),
      terms_(hosts_.sizes()),
      ranks_(std::accumulate(terms_.begin(), terms_.end(), 0)),
      host_segment_(host_segment) {
    if (host_segment.slots.rank() == 0) post_receives();
}

// The leader of the host `distance` places after this one.
int MultiHostGroup::leader(std::size_t distance) const {
    return hosts_.ranks[(hosts_.mine + distance) % hosts_.ranks.size()].front();
}

// Posts the receives of the next agreement.
void MultiHostGroup::post_receives() {
    const std::size_t hosts = hosts_.ranks.size();
    next_ = {std::make_shared<LeaderFrames>(hosts), {}};
    for (std::size_t have = 1; have < hosts; have *= 2) {
        auto* place = reinterpret_cast<std::byte*>(&(*next_.frames)[have]);
        const std::size_t bytes = std::min(have, hosts - have) * sizeof(LeaderFrame);
        next_.requests.push_back(remote.receive(leader(have), remote.tags.agreement(), place, bytes,
                                                std::chrono::milliseconds::zero(), next_.frames));
    }
}

// Combines the calls and data that the ranks of this host have posted in the first phase.
MultiHostGroup::LeaderFrame MultiHostGroup::host_frame(const Call& call, const std::byte* in, std::size_t bytes) {
    const SlotExchange& slots = host_segment_.slots;
    LeaderFrame frame;
    frame.call = call;
    frame.rank = host_segment_.membership.number(0);
    if (const int peer = slots.differs(); peer >= 0) {
        frame.other = slots.call(peer);
        frame.other_rank = host_segment_.membership.number(peer);
    } else if (bytes) {
        std::vector<const void*> each{in};
        for (int peer = 1; peer < slots.size(); ++peer) each.push_back(slots.theirs(peer));
        const TraceSpan span(TraceKind::kReduce, bytes);
        fold_terms(call.op, call.dtype, frame.data, each, {}, ranks_, call.count);
    }
    return frame;
}

// The frames of all hosts, by host: Bruck's all-gather among the leaders. Each round doubles the frames that a leader
// has.
MultiHostGroup::LeaderFrames MultiHostGroup::gather_frames(const LeaderFrame& mine, std::chrono::milliseconds timeout) {
    const std::size_t hosts = hosts_.ranks.size();
    GatherRound now = std::move(next_);
    const auto began = Clock::now();
    LeaderFrames& frames = *now.frames;
    frames[0] = mine;
    std::vector<RemotePeers::Handle> sent;
    try {
        for (std::size_t have = 1, round = 0; have < hosts; have *= 2, ++round) {
            const std::size_t bytes = std::min(have, hosts - have) * sizeof(LeaderFrame);
            const auto* from = reinterpret_cast<const std::byte*>(frames.data());
            sent.push_back(
                remote.send(leader(hosts - have), remote.tags.agreement(), from, bytes, timeout, now.frames));
            if (round == 0) post_receives();  // while the messages are in flight
            remote.wait(now.requests[round], timeout, began);
        }
        for (const auto& request : sent) remote.wait(request);
    } catch (...) {
        remote.end();
        throw;
    }
    const auto first = frames.begin();
    std::rotate(first, first + static_cast<std::ptrdiff_t>((hosts - hosts_.mine) % hosts), frames.end());
    return std::move(frames);
}

// Stores the first two calls that differ, if any do.
void MultiHostGroup::find_mismatch(LeaderFrame& verdict, const LeaderFrames& frames) const {
    verdict.call = frames[0].call;
    verdict.rank = frames[0].rank;
    verdict.other_rank = -1;
    for (const LeaderFrame& frame : frames) {
        const bool itself = !frame.call.agrees_with(verdict.call);
        if (!itself && frame.other_rank < 0) continue;
        verdict.other = itself ? frame.call : frame.other;
        verdict.other_rank = itself ? frame.rank : frame.other_rank;
        return;
    }
}

MultiHostGroup::LeaderFrame MultiHostGroup::agree_and_reduce(const Call& call, const std::byte* in, std::size_t bytes,
                                                             std::chrono::milliseconds timeout) {
    SlotExchange& slots = host_segment_.slots;
    slots.open(call, timeout + RemotePeers::kLocalMargin, false);
    if (bytes) std::memcpy(slots.mine(), in, bytes);
    slots.phase();
    LeaderFrame verdict;
    if (slots.rank() == 0) {
        const LeaderFrames frames = gather_frames(host_frame(call, in, bytes), timeout);
        find_mismatch(verdict, frames);
        if (verdict.other_rank < 0 && bytes) {
            std::vector<const void*> each;
            for (const LeaderFrame& frame : frames) each.push_back(frame.data);
            const TraceSpan span(TraceKind::kReduce, bytes);
            fold_terms(call.op, call.dtype, verdict.data, each, terms_, ranks_, call.count);
        }
        std::memcpy(slots.mine(), &verdict, sizeof(verdict));
        slots.phase();
    } else {
        const BackgroundScope sleeping;  // the leader waits for the network, and needs the core for it
        slots.renew();                   // the leader has its full timeout, even if this rank has come early
        slots.phase();
    }
    std::memcpy(&verdict, slots.theirs(0), sizeof(verdict));
    if (verdict.other_rank >= 0)
        throw_mismatch(host_segment_.membership.number(slots.rank()), verdict.rank, verdict.call, verdict.other_rank,
                       verdict.other);
    return verdict;
}

void MultiHostGroup::agree(const Call& call, std::chrono::milliseconds timeout) {
    agree_and_reduce(call, nullptr, 0, timeout);
}

void MultiHostGroup::all_reduce(const Call& call, const std::byte* in, std::byte* out,
                                std::chrono::milliseconds timeout) {
    const std::size_t bytes = call.count * size_of(call.dtype);
    const LeaderFrame verdict = agree_and_reduce(call, in, bytes, timeout);
    if (bytes) std::memcpy(out, verdict.data, bytes);
}

}  // namespace dist_prims
