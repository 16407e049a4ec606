#include "multi_host.h"

#include <algorithm>
#include <cstddef>
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

// What a leader contributes for its host: a checksum of the call of its ranks, the sum of their terms and of their
// data.
struct MultiHostGroup::LeaderFrame {
    std::uint64_t checksum = 0;
    Terms terms{};
    std::uint32_t differs = 0;  // 1: the ranks of the host have made different calls
    std::uint32_t bytes = 0;    // of the data: a message has no more
    alignas(kCacheLine) std::byte data[kSmall] = {};

    static constexpr std::size_t kHeader = 32;
};

// Two calls that differ, if any do, and the rank of each; -1: there is none.
struct MultiHostGroup::Difference {
    Call call, other;
    std::int32_t rank = -1, other_rank = -1;
};

// What the leader of a host tells its ranks.
struct MultiHostGroup::Verdict {
    Difference difference;
    Terms terms{};
    alignas(kCacheLine) std::byte data[kSmall] = {};
};

// The first `count` frames as a message.
MultiHostGroup::Message MultiHostGroup::packed(const LeaderFrames& frames, std::size_t count) {
    Message message;
    for (std::size_t each = 0; each < count; ++each) {
        const auto* first = reinterpret_cast<const std::byte*>(&frames[each]);
        message.insert(message.end(), first, first + LeaderFrame::kHeader);
        message.insert(message.end(), frames[each].data, frames[each].data + frames[each].bytes);
    }
    return message;
}

// Appends the `count` frames of a message.
void MultiHostGroup::unpack(const Message& message, std::size_t count, LeaderFrames& frames) {
    const std::byte* from = message.data();
    for (std::size_t each = 0; each < count; ++each) {
        LeaderFrame& frame = frames.emplace_back();
        std::memcpy(static_cast<void*>(&frame), from, LeaderFrame::kHeader);
        std::memcpy(frame.data, from + LeaderFrame::kHeader, frame.bytes);
        from += LeaderFrame::kHeader + frame.bytes;
    }
}

MultiHostGroup::MultiHostGroup(Hosts hosts, HostSegment& host_segment, std::unique_ptr<Transport> transport)
    : remote(std::move(transport), host_segment.membership, hosts.remote_ranks()),
      router(host_segment.p2p, hosts.local_ranks(), &remote),
      hosts_(std::move(hosts)),
      sizes_(hosts_.sizes()),
      ranks_(std::accumulate(sizes_.begin(), sizes_.end(), 0)),
      host_segment_(host_segment),
      rounds_(gather_rounds(hosts_.ranks.size())) {
    static_assert(sizeof(Verdict) <= kMinSlotBytes && sizeof(Difference) <= kSmall);
    static_assert(offsetof(LeaderFrame, bytes) + sizeof(LeaderFrame::bytes) == LeaderFrame::kHeader);
    if (host_segment.slots.rank() == 0) post_receives();
}

// The leader of the host `distance` places after this one.
int MultiHostGroup::leader(std::size_t distance) const {
    return hosts_.ranks[(hosts_.mine + distance) % hosts_.ranks.size()].front();
}

// The rounds of Bruck's all-gather of radix 4. A leader that has the frames of `have` hosts receives up to three times
// as many at once, so up to 4 hosts take one round. Between 4 hosts and more, radix 2 sends fewer messages in more
// rounds, each of which waits for the one before.
std::vector<MultiHostGroup::Round> MultiHostGroup::gather_rounds(std::size_t hosts) {
    constexpr std::size_t kRadix = 4;
    std::vector<Round> rounds;
    for (std::size_t have = 1; have < hosts; have *= kRadix) {
        Round& round = rounds.emplace_back();
        for (std::size_t distance = have; distance < std::min(have * kRadix, hosts); distance += have)
            round.push_back({distance, std::min(have, hosts - distance)});
    }
    return rounds;
}

// Posts the receives of the next agreement.
void MultiHostGroup::post_receives() {
    next_.clear();
    for (const Round& round : rounds_) {
        for (const Exchange& each : round) {
            const std::size_t largest = each.frames * (LeaderFrame::kHeader + kSmall);
            const auto message = std::make_shared<Message>(largest);
            next_.push_back({message, remote.receive(leader(each.distance), remote.tags.agreement(), message->data(),
                                                     largest, std::chrono::milliseconds::zero(), message)});
        }
    }
}

// The frame of this host: combines what its ranks have posted in the first phase.
MultiHostGroup::LeaderFrame MultiHostGroup::host_frame(const Call& call, std::size_t bytes) const {
    const SlotExchange& slots = host_segment_.slots;
    LeaderFrame frame;
    frame.checksum = call.checksum();
    frame.differs = slots.differs() >= 0;
    if (frame.differs) return frame;
    std::vector<const void*> each;
    for (int peer = 0; peer < slots.size(); ++peer) {
        Terms terms;
        std::memcpy(terms.data(), slots.theirs(peer), sizeof(terms));
        add(frame.terms, terms);
        each.push_back(slots.theirs(peer) + kCacheLine);
    }
    frame.bytes = static_cast<std::uint32_t>(bytes);
    if (bytes == 0) return frame;
    const TraceSpan span(TraceKind::kReduce, bytes);
    fold_terms(call.op, call.dtype, frame.data, each, {}, ranks_, call.count);
    return frame;
}

// The call of this host, and another one if its ranks have made different calls.
MultiHostGroup::Difference MultiHostGroup::host_difference(const Call& call) const {
    const SlotExchange& slots = host_segment_.slots;
    const Membership& membership = host_segment_.membership;
    const int peer = slots.differs();
    if (peer < 0) return {call, {}, membership.number(0), -1};
    return {call, slots.call(peer), membership.number(0), membership.number(peer)};
}

// The frames of all hosts, by host. A message has the frames one after the other, of each only the header and the data
// that there is.
MultiHostGroup::LeaderFrames MultiHostGroup::gather_frames(const LeaderFrame& mine, std::chrono::milliseconds timeout) {
    const std::size_t hosts = hosts_.ranks.size();
    std::vector<PostedReceive> now = std::move(next_);
    const auto began = Clock::now();
    LeaderFrames frames{mine};
    frames.reserve(hosts);
    std::vector<RemotePeers::Handle> sent;
    try {
        auto receive = now.begin();
        for (const Round& round : rounds_) {
            for (const Exchange& each : round) {
                const auto message = std::make_shared<Message>(packed(frames, each.frames));
                sent.push_back(remote.send(leader(hosts - each.distance), remote.tags.agreement(), message->data(),
                                           message->size(), timeout, message));
            }
            if (receive == now.begin()) post_receives();  // while the messages are in flight
            for (const Exchange& each : round) {
                remote.wait(receive->request, timeout, began);
                unpack(*receive++->message, each.frames, frames);
            }
        }
        for (const auto& request : sent) remote.wait(request);
    } catch (...) {
        remote.end();
        throw;
    }
    const auto first = frames.begin();
    std::rotate(first, first + static_cast<std::ptrdiff_t>((hosts - hosts_.mine) % hosts), frames.end());
    return frames;
}

// The first two calls that differ: a second gathering, of the calls themselves.
MultiHostGroup::Difference MultiHostGroup::find_difference(const Call& call, std::chrono::milliseconds timeout) {
    const Difference mine = host_difference(call);
    LeaderFrame frame;
    frame.bytes = sizeof(mine);
    std::memcpy(frame.data, &mine, sizeof(mine));
    Difference found;
    for (const LeaderFrame& each : gather_frames(frame, timeout)) {
        Difference theirs;
        std::memcpy(static_cast<void*>(&theirs), each.data, sizeof(theirs));
        if (found.rank < 0) found = theirs;
        if (found.other_rank >= 0) break;
        if (!theirs.call.agrees_with(found.call)) {
            found.other = theirs.call;
            found.other_rank = theirs.rank;
        } else if (theirs.other_rank >= 0) {
            found.other = theirs.other;
            found.other_rank = theirs.other_rank;
        }
    }
    return found;
}

// On a leader, after the ranks of its host have posted their calls.
MultiHostGroup::Verdict MultiHostGroup::decide(const Call& call, std::size_t bytes, std::chrono::milliseconds timeout) {
    Verdict verdict;
    const LeaderFrames frames = gather_frames(host_frame(call, bytes), timeout);
    const bool all_agree = std::all_of(frames.begin(), frames.end(), [&](const LeaderFrame& frame) {
        return !frame.differs && frame.checksum == frames[0].checksum;
    });
    if (!all_agree) {
        verdict.difference = find_difference(call, timeout);
        return verdict;
    }
    std::vector<const void*> each;
    for (const LeaderFrame& frame : frames) {
        add(verdict.terms, frame.terms);
        each.push_back(frame.data);
    }
    if (bytes == 0) return verdict;
    const TraceSpan span(TraceKind::kReduce, bytes);
    fold_terms(call.op, call.dtype, verdict.data, each, sizes_, ranks_, call.count);
    return verdict;
}

MultiHostGroup::Verdict MultiHostGroup::agree_and_reduce(const Call& call, const Terms& terms, const std::byte* in,
                                                         std::size_t bytes, std::chrono::milliseconds timeout) {
    SlotExchange& slots = host_segment_.slots;
    slots.open(call, timeout + RemotePeers::kLocalMargin, false);
    std::memcpy(slots.mine(), terms.data(), sizeof(terms));
    if (bytes) std::memcpy(slots.mine() + kCacheLine, in, bytes);
    slots.phase();
    if (slots.rank() == 0) {
        const Verdict verdict = decide(call, bytes, timeout);
        std::memcpy(slots.mine(), &verdict, sizeof(verdict));
        slots.phase();
    } else {
        const BackgroundScope sleeping;  // the leader waits for the network, and needs the core for it
        slots.renew();                   // the leader has its full timeout, even if this rank has come early
        slots.phase();
    }
    Verdict verdict;
    std::memcpy(static_cast<void*>(&verdict), slots.theirs(0), sizeof(verdict));
    const Difference& found = verdict.difference;
    if (found.other_rank >= 0)
        throw_mismatch(host_segment_.membership.number(slots.rank()), found.rank, found.call, found.other_rank,
                       found.other);
    return verdict;
}

Terms MultiHostGroup::agree(const Call& call, std::chrono::milliseconds timeout, const Terms& terms) {
    return agree_and_reduce(call, terms, nullptr, 0, timeout).terms;
}

LinkCosts MultiHostGroup::first_agreement(const Call& call, std::uint64_t network, std::chrono::milliseconds timeout) {
    LinkCosts costs;
    if (network && host_segment_.slots.rank() == 0 && hosts_.mine <= 1) {
        const int peer = hosts_.ranks[1 - hosts_.mine].front();
        if (hosts_.mine == 0)
            costs = measure_link(remote, peer, network, timeout);
        else
            help_measure_link(remote, peer, network, timeout);
    }
    return LinkCosts::unpacked(agree(call, timeout, {costs.beta > 0 ? costs.packed() : 0, 0})[0]);
}

void MultiHostGroup::all_reduce(const Call& call, const std::byte* in, std::byte* out,
                                std::chrono::milliseconds timeout) {
    const std::size_t bytes = call.count * size_of(call.dtype);
    const Verdict verdict = agree_and_reduce(call, {}, in, bytes, timeout);
    if (bytes) std::memcpy(out, verdict.data, bytes);
}

}  // namespace dist_prims
