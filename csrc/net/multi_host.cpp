// agree_and_carry() has the three steps of an agreement (see multi_host.h); decide() is the part of the leader.
#include "multi_host.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <stdexcept>

namespace dist_prims {

// The first part of a frame, which describes the call of a host. The data follows it.
struct MultiHostGroup::FrameHeader {
    std::uint64_t checksum = 0;  // of the call
    Terms terms{};               // the sums of its ranks' terms
    std::uint32_t differs = 0;   // 1: the ranks of the host have made different calls
    std::uint32_t bytes = 0;     // of the data
};

// A frame as another leader receives it. `data` is in a message, which is kept until the next agreement.
struct MultiHostGroup::LeaderFrame {
    FrameHeader header;
    const std::byte* data;
};

// Two calls that differ, if any do, and the rank of each; -1: there is none.
struct MultiHostGroup::Difference {
    Call call, other;
    std::int32_t rank = -1, other_rank = -1;
};

// What the leader of a host writes into its slot for the ranks of its host. If `is_moved`, the result follows it.
struct MultiHostGroup::Outcome {
    static constexpr std::size_t kSlotBytes = 1024;

    Difference difference;
    Terms terms{};
    bool is_moved = false;
};

// What travels with an agreement: no data if `piggyback` is null. Data moves only if the terms add up to `expected`.
struct MultiHostGroup::CarriedData {
    const Piggyback* piggyback;
    Terms terms, expected;
};

// Returns memory for a message of this length. The contents are undefined.
std::byte* MultiHostGroup::Message::reserve(std::size_t length) {
    if (length > capacity) {
        memory = std::make_unique_for_overwrite<std::byte[]>(length);
        capacity = length;
    }
    bytes = length;
    return memory.get();
}

MultiHostGroup::MultiHostGroup(Hosts hosts, HostSegment& host_segment, std::unique_ptr<Transport> transport)
    : remote(std::move(transport), host_segment.membership, hosts.remote_ranks()),
      router(host_segment.p2p, hosts.local_ranks(), &remote),
      hosts_(std::move(hosts)),
      host_segment_(host_segment),
      rounds_(rounds_of_gathering(hosts_.ranks.size())) {
    static_assert(sizeof(FrameHeader) == 40);
    static_assert(sizeof(Outcome) <= Outcome::kSlotBytes && sizeof(Difference) <= kSmall);
    static_assert(kMostData + kCacheLine <= kMinSlotBytes && kMostData + Outcome::kSlotBytes <= kMinSlotBytes);
    if (host_segment.slots.rank() == 0) post_receives();
}

// If there are several rounds, leaders forward what they have received, so all hosts must get the same data.
bool MultiHostGroup::can_carry(Collective collective, std::size_t bytes) const {
    if (Piggyback::most_bytes(hosts_, collective, bytes) > kMostData) return false;
    return rounds_.size() == 1 ||
           (Piggyback::is_for_all(collective) && bytes <= kSmall && hosts_.ranks.size() <= kFewHosts);
}

// The leader of the host `distance` places after this one.
int MultiHostGroup::leader(std::size_t distance) const {
    return hosts_.ranks[(hosts_.mine + distance) % hosts_.ranks.size()].front();
}

// The rounds of Bruck's all-gather of radix 4. A leader that has gathered the frames of n hosts receives those of up to
// 3 n others in the next round, so up to 4 hosts need one round. For more hosts radix 2 would send fewer messages, in
// more rounds, each of which waits for the last.
std::vector<MultiHostGroup::Round> MultiHostGroup::rounds_of_gathering(std::size_t hosts) {
    constexpr std::size_t kRadix = 4;
    std::vector<Round> rounds;
    for (std::size_t gathered = 1; gathered < hosts; gathered *= kRadix) {
        Round& round = rounds.emplace_back();
        for (std::size_t distance = gathered; distance < std::min(gathered * kRadix, hosts); distance += gathered)
            round.push_back({distance, std::min(gathered, hosts - distance)});
    }
    return rounds;
}

// The most bytes that a message has.
std::size_t MultiHostGroup::largest_message(const RoundMessage& message) const {
    return message.frames * (sizeof(FrameHeader) + (rounds_.size() == 1 ? kMostData : kSmall));
}

// Posts the receives of the next agreement, during the current one, whose frames are still read. The receives use the
// memory of the agreement before. gather_frames() sets their timeout, when it waits for them.
void MultiHostGroup::post_receives() {
    auto receive = next_receives_.begin();
    for (const Round& round : rounds_) {
        for (const RoundMessage& expected : round) {
            if (receive == next_receives_.end())
                receive = next_receives_.insert(receive, {std::make_shared<Message>(), nullptr});
            const std::size_t largest = largest_message(expected);
            std::byte* const memory = receive->message->reserve(largest);
            receive->request = remote.receive(leader(expected.distance), remote.tags.agreement(), memory, largest,
                                              std::chrono::milliseconds::zero(), receive->message);
            ++receive;
        }
    }
}

// The header of this host's frame: the sums of what its ranks have written before the first phase.
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

// Makes own_frames_: for each host the header, and the data for that host. Hosts that get the same frame share one.
void MultiHostGroup::pack_frames(FrameHeader header, const Piggyback* data) {
    const SlotExchange& slots = host_segment_.slots;
    std::vector<const std::byte*> rows;
    for (int peer = 0; peer < slots.size(); ++peer) rows.push_back(slots.theirs(peer) + kCacheLine);
    if (const std::byte* const row = data ? data->row_in_place() : nullptr) rows[0] = row;
    own_frames_.assign(hosts_.ranks.size(), nullptr);
    MessagePtr without_data, with_data;  // messages for several hosts, unless each host gets its own data
    for (std::size_t to = 0; to < own_frames_.size(); ++to) {
        const std::size_t bytes = data ? data->message_bytes(hosts_.mine, to) : 0;
        MessagePtr& frame = bytes == 0 ? without_data : with_data;
        if (!frame || (bytes && data->is_addressed())) {
            frame = outgoing_message();
            header.bytes = static_cast<std::uint32_t>(bytes);
            std::byte* const memory = frame->reserve(sizeof(header) + bytes);
            std::memcpy(memory, &header, sizeof(header));
            if (bytes) data->pack_message(to, rows, memory + sizeof(header));
        }
        own_frames_[to] = frame;
    }
}

// The call of this host's leader, and another call if the ranks of this host have made different calls.
MultiHostGroup::Difference MultiHostGroup::host_difference(const Call& call) const {
    const SlotExchange& slots = host_segment_.slots;
    const Membership& membership = host_segment_.membership;
    const int peer = slots.differing_rank();
    if (peer < 0) return {call, {}, membership.group_rank(0), -1};
    return {call, slots.call(peer), membership.group_rank(0), membership.group_rank(peer)};
}

// Appends the `count` frames of a message to `frames`.
void MultiHostGroup::append_frames(const Message& message, std::size_t count, LeaderFrames& frames) {
    const std::byte* from = message.memory.get();
    for (std::size_t index = 0; index < count; ++index) {
        LeaderFrame& frame = frames.emplace_back();
        std::memcpy(&frame.header, from, sizeof(frame.header));
        frame.data = from + sizeof(frame.header);
        from = frame.data + frame.header.bytes;
    }
}

// Makes a message of these frames, one after the other.
MultiHostGroup::MessagePtr MultiHostGroup::join_frames(const LeaderFrames& frames) {
    std::size_t bytes = 0;
    for (const LeaderFrame& frame : frames) bytes += sizeof(frame.header) + frame.header.bytes;
    MessagePtr message = outgoing_message();
    std::byte* to = message->reserve(bytes);
    for (const LeaderFrame& frame : frames) {
        std::memcpy(to, &frame.header, sizeof(frame.header));
        to += sizeof(frame.header);
        if (frame.header.bytes) std::memcpy(to, frame.data, frame.header.bytes);
        to += frame.header.bytes;
    }
    return message;
}

// Sends own_frames_ and returns the frames of all hosts, by host.
MultiHostGroup::LeaderFrames MultiHostGroup::gather_frames(std::chrono::milliseconds timeout) {
    const std::size_t hosts = hosts_.ranks.size();
    std::swap(current_receives_, next_receives_);
    const auto began = Clock::now();
    // The frames that this leader has: of its own host first, then of the hosts after it.
    LeaderFrames frames;
    frames.reserve(hosts);
    append_frames(*own_frames_[hosts_.mine], 1, frames);
    std::vector<RemotePeers::Handle> sent;
    try {
        auto receive = current_receives_.begin();
        for (const Round& round : rounds_) {
            // 1. Send. All leaders have the same rounds: the leader `each.distance` places before this one expects as
            // many frames from this one as this one expects from the leader that many places after it.
            const bool is_first = receive == current_receives_.begin();
            for (const RoundMessage& each : round) {
                const std::size_t distance = hosts - each.distance;
                const auto first = frames.begin();
                const MessagePtr message = is_first
                                               ? own_frames_[(hosts_.mine + distance) % hosts]
                                               : join_frames({first, first + static_cast<std::ptrdiff_t>(each.frames)});
                sent.push_back(remote.send(leader(distance), remote.tags.agreement(), message->memory.get(),
                                           message->bytes, timeout, message));
            }
            // 2. Post the receives of the next agreement, while the messages of this one are in flight.
            if (is_first) post_receives();
            // 3. Wait for the frames of this round.
            for (const RoundMessage& each : round) {
                remote.wait(receive->request, timeout, began);
                append_frames(*receive++->message, each.frames, frames);
            }
        }
        for (const auto& request : sent) remote.wait(request);
    } catch (...) {
        remote.end();
        throw;
    }
    outgoing_used_ = 0;
    // 4. The frame of host 0 becomes the first.
    const auto first = frames.begin();
    std::rotate(first, first + static_cast<std::ptrdiff_t>((hosts - hosts_.mine) % hosts), frames.end());
    return frames;
}

// Returns the first two calls that differ. The leaders gather frames again, whose data is the Difference of a host.
MultiHostGroup::Difference MultiHostGroup::find_difference(const Call& call, std::chrono::milliseconds timeout) {
    // 1. The frame of this host, the same for all hosts: a header, and the difference within this host.
    const Difference mine = host_difference(call);
    const MessagePtr message = outgoing_message();
    std::byte* const memory = message->reserve(sizeof(FrameHeader) + sizeof(mine));
    FrameHeader header;
    header.bytes = sizeof(mine);
    std::memcpy(memory, &header, sizeof(header));
    std::memcpy(memory + sizeof(header), &mine, sizeof(mine));
    own_frames_.assign(hosts_.ranks.size(), message);
    // 2. The first call of all, and the first other call: of another host, or within a host whose first rank agrees.
    Difference first;
    for (const LeaderFrame& frame : gather_frames(timeout)) {
        Difference theirs;
        std::memcpy(static_cast<void*>(&theirs), frame.data, sizeof(theirs));
        if (first.rank < 0) first = theirs;
        if (first.other_rank >= 0) break;
        if (!theirs.call.agrees_with(first.call)) {
            first.other = theirs.call;
            first.other_rank = theirs.rank;
        } else if (theirs.other_rank >= 0) {
            first.other = theirs.other;
            first.other_rank = theirs.other_rank;
        }
    }
    return first;
}

// The second step, on a leader. `result`: the memory into which the result of the data is written.
MultiHostGroup::Outcome MultiHostGroup::decide(const Call& call, const CarriedData& data, std::byte* result,
                                               std::chrono::milliseconds timeout) {
    // 1. Gather the frames of all hosts, and compare their calls.
    Outcome outcome;
    const FrameHeader header = host_header(call);
    pack_frames(header, header.differs ? nullptr : data.piggyback);
    const LeaderFrames frames = gather_frames(timeout);
    const bool all_agree = std::all_of(frames.begin(), frames.end(), [&](const LeaderFrame& frame) {
        return !frame.header.differs && frame.header.checksum == frames[0].header.checksum;
    });
    if (!all_agree) {
        outcome.difference = find_difference(call, timeout);
        return outcome;
    }
    // 2. Add up the terms, and combine the data.
    std::vector<const std::byte*> messages;
    for (const LeaderFrame& frame : frames) {
        add(outcome.terms, frame.header.terms);
        messages.push_back(frame.data);
    }
    if (!data.piggyback || outcome.terms != data.expected) return outcome;
    for (std::size_t host = 0; host < frames.size(); ++host) {
        if (frames[host].header.bytes != data.piggyback->message_bytes(host, hosts_.mine))
            throw std::logic_error("data of another length than the call has came with an agreement");
    }
    data.piggyback->combine(messages, result);
    outcome.is_moved = true;
    return outcome;
}

Terms MultiHostGroup::agree_and_carry(const Call& call, const CarriedData& data, std::chrono::milliseconds timeout) {
    // 1. Write the call, the terms and the data of this rank.
    SlotExchange& slots = host_segment_.slots;
    remote.begin_call(call, timeout);
    slots.open(call, timeout + RemotePeers::kLocalMargin, false);
    std::memcpy(slots.mine(), data.terms.data(), sizeof(data.terms));
    const bool is_leader = slots.rank() == 0;
    if (data.piggyback && !(is_leader && data.piggyback->row_in_place()))
        data.piggyback->write_row(slots.mine() + kCacheLine);
    slots.phase();
    // 2. The leader decides; the other ranks wait.
    std::byte* const in_place = data.piggyback && slots.size() == 1 ? data.piggyback->result_in_place() : nullptr;
    if (is_leader) {
        std::byte* const result = in_place ? in_place : slots.mine() + Outcome::kSlotBytes;
        const Outcome outcome = decide(call, data, result, timeout);
        std::memcpy(slots.mine(), &outcome, sizeof(outcome));
        slots.phase();
    } else {
        const BackgroundScope background;  // the leader waits for the network, and needs the core for it
        slots.restart_timeout();           // the leader has its full timeout, even if this rank has come early
        slots.phase();
    }
    // 3. Read the outcome.
    Outcome outcome;
    std::memcpy(static_cast<void*>(&outcome), slots.theirs(0), sizeof(outcome));
    const Difference& calls = outcome.difference;
    if (calls.other_rank >= 0)
        throw_mismatch(host_segment_.membership.own_name(), calls.rank, calls.call, calls.other_rank, calls.other);
    if (outcome.is_moved && !in_place) data.piggyback->copy_outputs(slots.theirs(0) + Outcome::kSlotBytes);
    return outcome.terms;
}

Terms MultiHostGroup::agree(const Call& call, std::chrono::milliseconds timeout, const Terms& terms) {
    return agree_and_carry(call, {nullptr, terms, {}}, timeout);
}

Terms MultiHostGroup::agree_and_move(const Call& call, const ProgramBuffer& buffer, std::chrono::milliseconds timeout,
                                     const Terms& terms, const Terms& expected) {
    const Piggyback piggyback(hosts_, rank(), call, buffer);
    return agree_and_carry(call, {&piggyback, terms, expected}, timeout);
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
    // The sum of the agreement is a broadcast: only the leader of host 0 has a number other than 0.
    return LinkCosts::unpacked(agree(call, timeout, {costs.beta > 0 ? costs.packed() : 0})[0]);
}

}  // namespace dist_prims
