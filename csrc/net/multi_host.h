// A group on several hosts, as one rank takes part in it: the segment that it shares with the ranks of its host, and
// the routes to the others.
//
// The first rank of each host is its leader. Everything that all ranks must agree on is combined in three steps: up to
// the leader of each host through shared memory, among the leaders in log4(hosts) rounds of messages, and down again.
// That includes each call, and data so small that it adds nothing to the time of the message.
//
//     host a   0 1 2 3      post call and data, the leader sums          wait              read verdict and sum
//     leaders  0 4 8                                        gather all (Bruck, radix 4)
//
// For each host 32 bytes are sent, with a checksum of the call, and the data. Only if checksums differ, a second
// gathering brings the calls themselves, for the error.
//
// Leaders post the receives of the next agreement at the end of the current one. gloo sends at once if the receive is
// posted; otherwise it sends a request first, which doubles the time. These receives are as large as the largest
// message; most messages are shorter.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "../shm/host_segment.h"
#include "link_costs.h"
#include "remote_peers.h"
#include "router.h"

namespace dist_prims {

struct Hosts {
    std::vector<std::vector<int>> ranks;  // by host, in order
    std::size_t mine = 0;                 // the index of this host

    std::vector<int> local_ranks() const;   // by rank of the group: the rank on this host, or -1
    std::vector<int> sizes() const;         // the number of ranks of each host
    std::vector<int> remote_ranks() const;  // the ranks of other hosts
};

// Two numbers that an agreement adds over all ranks, each modulo 2^64.
using Terms = std::array<std::uint64_t, 2>;

inline void add(Terms& sum, const Terms& terms) {
    for (std::size_t each = 0; each < sum.size(); ++each) sum[each] += terms[each];
}

class MultiHostGroup {
public:
    static constexpr std::size_t kMinSlotBytes = 4096;  // a Verdict must fit a slot

    MultiHostGroup(Hosts hosts, HostSegment& host_segment, std::unique_ptr<Transport> transport);

    // Returns when all ranks are about to make this call; throws Mismatch on all ranks if one is not. Calls
    // slots.open() itself. The result is the sum of the terms of all ranks.
    Terms agree(const Call& call, std::chrono::milliseconds timeout, const Terms& terms = {});

    // Agrees on the call and reduces its data in the same messages. The data must satisfy is_small().
    bool is_small(std::size_t bytes) const { return bytes <= kSmall && hosts_.ranks.size() <= kFewHosts; }
    void all_reduce(const Call& call, const std::byte* in, std::byte* out, std::chrono::milliseconds timeout);

    // The first agreement of the group, in which all ranks learn what the link between the first two hosts costs.
    // `network`: see measure_link(); if it is 0 the link is not measured. Either all ranks give 0, or none does.
    LinkCosts first_agreement(const Call& call, std::uint64_t network, std::chrono::milliseconds timeout);

    RemotePeers remote;
    Router router;

private:
    static constexpr std::size_t kSmall = 1024, kFewHosts = 64;

    struct LeaderFrame;
    struct Difference;
    struct Verdict;
    using LeaderFrames = std::vector<LeaderFrame>;
    using Message = std::vector<std::byte>;
    // A message of a round: the frames of so many hosts, from the leader `distance` places after the receiver.
    struct Exchange {
        std::size_t distance, frames;
    };
    using Round = std::vector<Exchange>;
    struct PostedReceive {
        std::shared_ptr<Message> message;
        RemotePeers::Handle request;
    };

    static std::vector<Round> gather_rounds(std::size_t hosts);
    static Message packed(const LeaderFrames& frames, std::size_t count);
    static void unpack(const Message& message, std::size_t count, LeaderFrames& frames);

    int leader(std::size_t distance) const;
    LeaderFrame host_frame(const Call& call, std::size_t bytes) const;
    Difference host_difference(const Call& call) const;
    void post_receives();
    LeaderFrames gather_frames(const LeaderFrame& mine, std::chrono::milliseconds timeout);
    Difference find_difference(const Call& call, std::chrono::milliseconds timeout);
    Verdict decide(const Call& call, std::size_t bytes, std::chrono::milliseconds timeout);
    Verdict agree_and_reduce(const Call& call, const Terms& terms, const std::byte* in, std::size_t bytes,
                             std::chrono::milliseconds timeout);

    const Hosts hosts_;
    const std::vector<int> sizes_;  // the number of ranks of each host
    const int ranks_;
    HostSegment& host_segment_;
    const std::vector<Round> rounds_;
    std::vector<PostedReceive> next_;  // on leaders: those of the next agreement, in the order of the rounds
};

}  // namespace dist_prims
