#include "multi_host.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <stdexcept>

namespace dist_prims {

// What a leader tells the others of the call of its host, before its data.
struct MultiHostGroup::FrameHeader {
    std::uint64_t checksum = 0;  // of the call
    Terms terms{};               // the sums of its ranks' terms
    std::uint32_t differs = 0;   // 1: the ranks of the host have made different calls
    std::uint32_t bytes = 0;     // of the data
};

// A frame in a message, which is valid until the next agreement.
struct MultiHostGroup::LeaderFrame {
    FrameHeader header;
    const std::byte* data;
};

// Two calls that differ, if any do, and the rank of each; -1: there is none.
struct MultiHostGroup::Difference {
    Call call, other;
    std::int32_t rank = -1, other_rank = -1;
};

// What the leader of a host tells its ranks. The result of the data follows in the slot if it has `moved`.
struct MultiHostGroup::Verdict {
    static constexpr std::size_t kRoom = 1024;

    Difference difference;
    Terms terms{};
    bool moved = false;
};

// The data of a call, which is null if none travels with the agreement.
struct MultiHostGroup::Data {
    const Piggyback* piggyback;
    Terms terms, wanted;
};

// Contents are lost if the memory grows.
std::byte* MultiHostGroup::Message::reserve(std::size_t wanted) {
    if (wanted > capacity) {
        memory = std::make_unique_for_overwrite<std::byte[]>(wanted);
        capacity = wanted;
    }
    bytes = wanted;
    return memory.get();
}

MultiHostGroup::MultiHostGroup(Hosts hosts, HostSegment& host_segment, std::unique_ptr<Transport> transport)
    : remote(std::move(transport), host_segment.membership, hosts.remote_ranks()),
      router(host_segment.p2p, hosts.local_ranks(), &remote),
      hosts_(std::move(hosts)),
      host_segment_(host_segment),
      rounds_(gather_rounds(hosts_.ranks.size())) {
    static_assert(sizeof(FrameHeader) == 40);
    static_assert(sizeof(Verdict) <= Verdict::kRoom && sizeof(Difference) <= kSmall);
    static_assert(kMostData + kCacheLine <= kMinSlotBytes && kMostData + Verdict::kRoom <= kMinSlotBytes);
    if (host_segment.slots.rank() == 0) post_receives();
}

// Rounds after the first forward what they have received, so all hosts must get the same.
bool MultiHostGroup::can_carry(Collective collective, std::size_t bytes) const {
    if (Piggyback::most_bytes(hosts_, collective, bytes) > kMostData) return false;
    return rounds_.size() == 1 ||
           (Piggyback::is_for_all(collective) && bytes <= kSmall && hosts_.ranks.size() <= kFewHosts);
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

// The most bytes of a message.
std::size_t MultiHostGroup::largest_message(const Exchange& exchange) const {
    return exchange.frames * (sizeof(FrameHeader) + (rounds_.size() == 1 ? kMostData : kSmall));
}

// Posts the receives of the next agreement, into the memory of the last one's receives.
void MultiHostGroup::post_receives() {
    auto posted = next_.begin();
    for (const Round& round : rounds_) {
        for (const Exchange& each : round) {
            if (posted == next_.end()) posted = next_.insert(posted, {std::make_shared<Message>(), nullptr});
            const std::size_t largest = largest_message(each);
            std::byte* const memory = posted->message->reserve(largest);
            posted->request = remote.receive(leader(each.distance), remote.tags.agreement(), memory, largest,
                                             std::chrono::milliseconds::zero(), posted->message);
            ++posted;
        }
    }
}

// Combines what the ranks of this host have posted in the first phase.
MultiHostGroup::FrameHeader MultiHostGroup::host_header(const Call& call) const {
    const SlotExchange& slots = host_segment_.slots;
    FrameHeader header;
    header.checksum = call.checksum();
    header.differs = slots.differing_rank() >= 0;
    for (int peer = 0; peer < slots.size(); ++peer) {
        Terms terms;
        std::memcpy(terms.data(), slots.theirs(peer), sizeof(terms));
        add(header.terms, terms);
    }
    return header;
}

// Memory for a message of the current agreement.
MultiHostGroup::MessagePtr MultiHostGroup::outgoing_message() {
    if (outgoing_used_ == outgoing_.size()) outgoing_.push_back(std::make_shared<Message>());
    return outgoing_[outgoing_used_++];
}

// Makes the frame for each host: the header, and the data if there is any.
void MultiHostGroup::pack_frames(FrameHeader header, const Piggyback* data) {
    const SlotExchange& slots = host_segment_.slots;
    std::vector<const std::byte*> rows;
    for (int peer = 0; peer < slots.size(); ++peer) rows.push_back(slots.theirs(peer) + kCacheLine);
    frames_.assign(hosts_.ranks.size(), nullptr);
    MessagePtr without_data, same;
    for (std::size_t to = 0; to < frames_.size(); ++to) {
        const std::size_t bytes = data ? data->message_bytes(hosts_.mine, to) : 0;
        MessagePtr& known = bytes == 0 ? without_data : same;
        if (!known || (bytes && data->is_addressed())) {
            known = outgoing_message();
            header.bytes = static_cast<std::uint32_t>(bytes);
            std::byte* const memory = known->reserve(sizeof(header) + bytes);
            std::memcpy(memory, &header, sizeof(header));
            if (bytes) data->pack(to, rows, memory + sizeof(header));
        }
        frames_[to] = known;
    }
}

// The call of this host, and another one if its ranks have made different calls.
MultiHostGroup::Difference MultiHostGroup::host_difference(const Call& call) const {
    const SlotExchange& slots = host_segment_.slots;
    const Membership& membership = host_segment_.membership;
    const int peer = slots.differing_rank();
    if (peer < 0) return {call, {}, membership.group_rank(0), -1};
    return {call, slots.call(peer), membership.group_rank(0), membership.group_rank(peer)};
}

// Appends the `count` frames of a message.
void MultiHostGroup::unpack(const Message& message, std::size_t count, LeaderFrames& frames) {
    const std::byte* from = message.memory.get();
    for (std::size_t each = 0; each < count; ++each) {
        LeaderFrame& frame = frames.emplace_back();
        std::memcpy(&frame.header, from, sizeof(frame.header));
        frame.data = from + sizeof(frame.header);
        from = frame.data + frame.header.bytes;
    }
}

// A message of these frames, one after the other.
MultiHostGroup::MessagePtr MultiHostGroup::joined(const LeaderFrames& frames) {
    std::size_t bytes = 0;
    for (const LeaderFrame& each : frames) bytes += sizeof(each.header) + each.header.bytes;
    MessagePtr message = outgoing_message();
    std::byte* to = message->reserve(bytes);
    for (const LeaderFrame& each : frames) {
        std::memcpy(to, &each.header, sizeof(each.header));
        to += sizeof(each.header);
        if (each.header.bytes) std::memcpy(to, each.data, each.header.bytes);
        to += each.header.bytes;
    }
    return message;
}

// Sends frames_ and returns the frames of all hosts, by host.
MultiHostGroup::LeaderFrames MultiHostGroup::gather_frames(std::chrono::milliseconds timeout) {
    const std::size_t hosts = hosts_.ranks.size();
    std::swap(now_, next_);
    const auto began = Clock::now();
    LeaderFrames frames;
    frames.reserve(hosts);
    unpack(*frames_[hosts_.mine], 1, frames);
    std::vector<RemotePeers::Handle> sent;
    try {
        auto receive = now_.begin();
        for (const Round& round : rounds_) {
            const bool is_first = receive == now_.begin();
            for (const Exchange& each : round) {
                const std::size_t distance = hosts - each.distance;
                const auto first = frames.begin();
                const MessagePtr message = is_first ? frames_[(hosts_.mine + distance) % hosts]
                                                    : joined({first, first + static_cast<std::ptrdiff_t>(each.frames)});
                sent.push_back(remote.send(leader(distance), remote.tags.agreement(), message->memory.get(),
                                           message->bytes, timeout, message));
            }
            if (is_first) post_receives();  // while the messages are in flight
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
    outgoing_used_ = 0;
    const auto first = frames.begin();
    std::rotate(first, first + static_cast<std::ptrdiff_t>((hosts - hosts_.mine) % hosts), frames.end());
    return frames;
}

// The first two calls that differ: a second gathering, of the calls themselves.
MultiHostGroup::Difference MultiHostGroup::find_difference(const Call& call, std::chrono::milliseconds timeout) {
    const Difference mine = host_difference(call);
    const MessagePtr message = outgoing_message();
    std::byte* const memory = message->reserve(sizeof(FrameHeader) + sizeof(mine));
    FrameHeader header;
    header.bytes = sizeof(mine);
    std::memcpy(memory, &header, sizeof(header));
    std::memcpy(memory + sizeof(header), &mine, sizeof(mine));
    frames_.assign(hosts_.ranks.size(), message);
    Difference found;
    for (const LeaderFrame& each : gather_frames(timeout)) {
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

// On a leader, after the ranks of its host have posted their calls. `result`: where the result of the data is written.
MultiHostGroup::Verdict MultiHostGroup::decide(const Call& call, const Data& data, std::byte* result,
                                               std::chrono::milliseconds timeout) {
    Verdict verdict;
    const FrameHeader header = host_header(call);
    pack_frames(header, header.differs ? nullptr : data.piggyback);
    const LeaderFrames frames = gather_frames(timeout);
    const bool all_agree = std::all_of(frames.begin(), frames.end(), [&](const LeaderFrame& frame) {
        return !frame.header.differs && frame.header.checksum == frames[0].header.checksum;
    });
    if (!all_agree) {
        verdict.difference = find_difference(call, timeout);
        return verdict;
    }
    std::vector<const std::byte*> messages;
    for (const LeaderFrame& frame : frames) {
        add(verdict.terms, frame.header.terms);
        messages.push_back(frame.data);
    }
    if (!data.piggyback || verdict.terms != data.wanted) return verdict;
    for (std::size_t host = 0; host < frames.size(); ++host) {
        if (frames[host].header.bytes != data.piggyback->message_bytes(host, hosts_.mine))
            throw std::logic_error("data of another length than the call has came with an agreement");
    }
    data.piggyback->combine(messages, result);
    verdict.moved = true;
    return verdict;
}

Terms MultiHostGroup::run(const Call& call, const Data& data, std::chrono::milliseconds timeout) {
    SlotExchange& slots = host_segment_.slots;
    remote.begin_call(call, timeout);
    slots.open(call, timeout + RemotePeers::kLocalMargin, false);
    std::memcpy(slots.mine(), data.terms.data(), sizeof(data.terms));
    if (data.piggyback) data.piggyback->post(slots.mine() + kCacheLine);
    slots.phase();
    if (slots.rank() == 0) {
        const Verdict verdict = decide(call, data, slots.mine() + Verdict::kRoom, timeout);
        std::memcpy(slots.mine(), &verdict, sizeof(verdict));
        slots.phase();
    } else {
        const BackgroundScope sleeping;  // the leader waits for the network, and needs the core for it
        slots.restart_timeout();         // the leader has its full timeout, even if this rank has come early
        slots.phase();
    }
    Verdict verdict;
    std::memcpy(static_cast<void*>(&verdict), slots.theirs(0), sizeof(verdict));
    const Difference& found = verdict.difference;
    if (found.other_rank >= 0) throw_mismatch(rank(), found.rank, found.call, found.other_rank, found.other);
    if (verdict.moved) data.piggyback->deliver(slots.theirs(0) + Verdict::kRoom);
    return verdict.terms;
}

Terms MultiHostGroup::agree(const Call& call, std::chrono::milliseconds timeout, const Terms& terms) {
    return run(call, {nullptr, terms, {}}, timeout);
}

Terms MultiHostGroup::agree_and_move(const Call& call, const ProgramBuffer& buffer, std::chrono::milliseconds timeout,
                                     const Terms& terms, const Terms& wanted) {
    const Piggyback piggyback(hosts_, rank(), call, buffer);
    return run(call, {&piggyback, terms, wanted}, timeout);
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
    return LinkCosts::unpacked(agree(call, timeout, {costs.beta > 0 ? costs.packed() : 0})[0]);
}

}  // namespace dist_prims
