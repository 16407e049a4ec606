// A group on several hosts, as one rank takes part in it: the agreement of all ranks on each call, and the routes to
// the other ranks. The adapter for torch has one object for each such group, and calls it in the thread that makes the
// call.
//
// In an agreement all ranks compare the calls that they are about to make, and add up numbers (Terms). Data of the
// collective travels in the same messages if that is its fastest way (see piggyback.h). The first rank of each host is
// its leader. An agreement has three steps:
//
//     1. ranks     write their calls, terms and data into their slots in shared memory; phase
//     2. leaders   gather a frame from each leader, in log4(hosts) rounds of messages (Bruck, radix 4), and write the
//                  outcome, with the result of the data, into their slots; the other ranks wait in the next phase
//     3. ranks     read the outcome and the result in the slot of their leader
//
// A frame is what a leader sends of its host: 40 bytes with a checksum of the call, and the data. Only if checksums
// differ, a second gathering brings the calls themselves, for the error. No rank has written its output then.
//
// Leaders post the receives of the next agreement in the middle of the current one, so that a message never waits for
// its receive. These receives are as large as the largest message; most messages are shorter.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "../shm/host_segment.h"
#include "hosts.h"
#include "link_costs.h"
#include "piggyback.h"
#include "remote_peers.h"
#include "router.h"

namespace dist_prims {

// Three numbers that an agreement adds over all ranks, each modulo 2^64.
using Terms = std::array<std::uint64_t, 3>;

inline void add(Terms& sum, const Terms& terms) {
    for (std::size_t each = 0; each < sum.size(); ++each) sum[each] += terms[each];
}

class MultiHostGroup {
public:
    static constexpr std::size_t kMostData = 128 << 10;  // bytes in a message of an agreement, and in a slot
    static constexpr std::size_t kMinSlotBytes = kMostData + 4096;

    MultiHostGroup(Hosts hosts, HostSegment& host_segment, std::unique_ptr<Transport> transport);

    // Returns when all ranks are about to make this call; throws Mismatch on all ranks if one is not. Calls
    // slots.open() itself. The result is the sum of the terms of all ranks.
    Terms agree(const Call& call, std::chrono::milliseconds timeout, const Terms& terms = {});

    // Whether the data of a collective, of this size as a schedule counts it, can travel with the agreement.
    bool can_carry(Collective collective, std::size_t bytes) const;
    // The same for data so small that it adds nothing to the time of the agreement.
    bool is_small(Collective collective, std::size_t bytes) const {
        return bytes <= kSmall && can_carry(collective, bytes);
    }
    // As agree(), and moves the data of the call in the same messages. can_carry() must hold. If the sum of the terms
    // is not `expected`, no output is written.
    Terms agree_and_move(const Call& call, const ProgramBuffer& buffer, std::chrono::milliseconds timeout,
                         const Terms& terms = {}, const Terms& expected = {});

    // The first agreement of the group, in which all ranks learn what the link between the first two hosts costs.
    // `network`: see measure_link(); if it is 0 the link is not measured. Either all ranks give 0, or none does.
    LinkCosts first_agreement(const Call& call, std::uint64_t network, std::chrono::milliseconds timeout);

    RemotePeers remote;
    Router router;

private:
    // Data that is the same for all hosts is forwarded by other leaders, if it has few bytes and the group few hosts.
    static constexpr std::size_t kSmall = 1024, kFewHosts = 64;

    struct FrameHeader;
    struct LeaderFrame;
    struct Difference;
    struct Outcome;
    struct CarriedData;
    using LeaderFrames = std::vector<LeaderFrame>;
    // Memory of a message, which is used again for later ones.
    struct Message {
        std::unique_ptr<std::byte[]> memory;
        std::size_t capacity = 0, bytes = 0;

        std::byte* reserve(std::size_t length);
    };
    using MessagePtr = std::shared_ptr<Message>;
    // A message of a round: `frames` frames, from the leader of the host `distance` places after the receiver's.
    struct RoundMessage {
        std::size_t distance, frames;
    };
    using Round = std::vector<RoundMessage>;
    struct PostedReceive {
        MessagePtr message;
        RemotePeers::Handle request;
    };

    static std::vector<Round> rounds_of_gathering(std::size_t hosts);

    int leader(std::size_t distance) const;
    int rank() const { return host_segment_.membership.group_rank(host_segment_.slots.rank()); }
    std::size_t largest_message(const RoundMessage& message) const;
    FrameHeader host_header(const Call& call) const;
    Difference host_difference(const Call& call) const;
    void post_receives();
    MessagePtr outgoing_message();
    void pack_frames(FrameHeader header, const Piggyback* data);
    static void append_frames(const Message& message, std::size_t count, LeaderFrames& frames);
    MessagePtr join_frames(const LeaderFrames& frames);
    LeaderFrames gather_frames(std::chrono::milliseconds timeout);
    Difference find_difference(const Call& call, std::chrono::milliseconds timeout);
    Outcome decide(const Call& call, const CarriedData& data, std::byte* result, std::chrono::milliseconds timeout);
    Terms agree_and_carry(const Call& call, const CarriedData& data, std::chrono::milliseconds timeout);

    const Hosts hosts_;
    HostSegment& host_segment_;
    const std::vector<Round> rounds_;
    // On leaders:
    std::vector<MessagePtr> own_frames_;  // this host's frame of the current agreement, by the host that gets it
    std::vector<MessagePtr> outgoing_;    // own_frames_ and the messages of later rounds; kept for the next agreement
    std::size_t outgoing_used_ = 0;       // how many of outgoing_ belong to the current agreement
    // Of the current and the next agreement, in the order of the rounds:
    std::vector<PostedReceive> current_receives_, next_receives_;
};

}  // namespace dist_prims
