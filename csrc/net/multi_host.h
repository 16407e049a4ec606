// A group on several hosts, as one rank takes part in it: the segment that it shares with the ranks of its host, and
// the routes to the others.
//
// The first rank of each host is its leader. Everything that all ranks must agree on is combined in three steps: up to
// the leader of each host through shared memory, among the leaders in log4(hosts) rounds of messages, and down again.
// That includes each call, and data for which these messages are the fastest way (see piggyback.h).
//
//     host a   0 1 2 3      post call and data                    wait                 read verdict and result
//     leaders  0 4 8                                   gather all (Bruck, radix 4)
//
// For each host 40 bytes are sent, with a checksum of the call, and the data. Only if checksums differ, a second
// gathering brings the calls themselves, for the error. Then no rank has written its output.
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
    static constexpr std::size_t kMostData = 128 << 10;  // in a message of an agreement, and in a slot
    static constexpr std::size_t kMinSlotBytes = kMostData + 4096;

    MultiHostGroup(Hosts hosts, HostSegment& host_segment, std::unique_ptr<Transport> transport);

    // Returns when all ranks are about to make this call; throws Mismatch on all ranks if one is not. Calls
    // slots.open() itself. The result is the sum of the terms of all ranks.
    Terms agree(const Call& call, std::chrono::milliseconds timeout, const Terms& terms = {});

    // Whether the data of a collective can travel with the agreement; `bytes` is the size of the data as a
    // schedule counts it.
    bool can_carry(Collective collective, std::size_t bytes) const;
    // The same for data so small that it adds nothing to the time of the agreement.
    bool is_small(Collective collective, std::size_t bytes) const {
        return bytes <= kSmall && can_carry(collective, bytes);
    }
    // Agrees on the call and moves its data in the same messages, unless the sum of the terms is not `wanted`: then no
    // output is written. can_carry() must hold.
    Terms agree_and_move(const Call& call, const ProgramBuffer& buffer, std::chrono::milliseconds timeout,
                         const Terms& terms = {}, const Terms& wanted = {});

    // The first agreement of the group, in which all ranks learn what the link between the first two hosts costs.
    // `network`: see measure_link(); if it is 0 the link is not measured. Either all ranks give 0, or none does.
    LinkCosts first_agreement(const Call& call, std::uint64_t network, std::chrono::milliseconds timeout);

    RemotePeers remote;
    Router router;

private:
    // Data that is the same for all hosts may be forwarded, by so many bytes a host, in a group of few hosts.
    static constexpr std::size_t kSmall = 1024, kFewHosts = 64;

    struct FrameHeader;
    struct LeaderFrame;
    struct Difference;
    struct Verdict;
    struct Data;
    using LeaderFrames = std::vector<LeaderFrame>;
    // Memory of a message, which is used again for later ones.
    struct Message {
        std::unique_ptr<std::byte[]> memory;
        std::size_t capacity = 0, bytes = 0;

        std::byte* reserve(std::size_t wanted);
    };
    using MessagePtr = std::shared_ptr<Message>;
    // A message of a round: the frames of so many hosts, from the leader `distance` places after the receiver.
    struct Exchange {
        std::size_t distance, frames;
    };
    using Round = std::vector<Exchange>;
    struct PostedReceive {
        MessagePtr message;
        RemotePeers::Handle request;
    };

    static std::vector<Round> gather_rounds(std::size_t hosts);

    int leader(std::size_t distance) const;
    int rank() const { return host_segment_.membership.group_rank(host_segment_.slots.rank()); }
    std::size_t largest_message(const Exchange& exchange) const;
    FrameHeader host_header(const Call& call) const;
    Difference host_difference(const Call& call) const;
    void post_receives();
    MessagePtr outgoing_message();
    void pack_frames(FrameHeader header, const Piggyback* data);
    static void unpack(const Message& message, std::size_t count, LeaderFrames& frames);
    MessagePtr joined(const LeaderFrames& frames);
    LeaderFrames gather_frames(std::chrono::milliseconds timeout);
    Difference find_difference(const Call& call, std::chrono::milliseconds timeout);
    Verdict decide(const Call& call, const Data& data, std::byte* result, std::chrono::milliseconds timeout);
    Terms run(const Call& call, const Data& data, std::chrono::milliseconds timeout);

    const Hosts hosts_;
    HostSegment& host_segment_;
    const std::vector<Round> rounds_;
    // On leaders:
    std::vector<MessagePtr> frames_;    // the own frame of the current agreement, by the host that gets it
    std::vector<MessagePtr> outgoing_;  // frames_ and the frames of later rounds, the first outgoing_used_ in use
    std::size_t outgoing_used_ = 0;
    std::vector<PostedReceive> now_, next_;  // of the current and the next agreement, in the order of the rounds
};

}  // namespace dist_prims
