// A group on several hosts, as one rank takes part in it: the room that it shares with the ranks of its host, and the
// way to the others.
//
// The first rank of each host is its leader. What all must agree on goes up to the leaders through the room, round
// among them in a logarithm of messages, and down again: the calls themselves, and with them data so small that the
// message would be no shorter without it.
//
//     host a   0 1 2 3      post call and data, the leader sums          wait              read verdict and sum
//     leaders  0 4 8                                        gather all (Bruck)
//
// Leaders ask for the messages of the next meeting at the end of this one: gloo sends at once what has been asked for,
// and otherwise asks back first, which doubles the time.
#pragma once

#include <memory>
#include <vector>

#include "far.h"
#include "room.h"
#include "route.h"

namespace dist_prims {

struct Hosts {
    std::vector<std::vector<int>> ranks;  // of each host, in order
    std::size_t mine = 0;                 // the host that this is

    std::vector<int> seats() const;      // of each rank of the group, its rank on this host, or -1
    std::vector<int> strangers() const;  // the ranks of other hosts
};

class Span {
public:
    static constexpr std::size_t kLeastSlot = 4096;  // a frame goes into a slot

    Span(Hosts hosts, Room& room, std::unique_ptr<Engine> engine);
    ~Span();

    // Return when all ranks are about to make this call, which ran in the room as board.open(); Mismatch on all ranks
    // if one is not.
    void agree(const Call& call, std::chrono::milliseconds timeout);

    // Agree, and reduce what is_small.
    bool is_small(std::size_t bytes) const { return bytes <= kSmall && hosts_.ranks.size() <= kFewHosts; }
    void all_reduce(const Call& call, const std::byte* in, std::byte* out, std::chrono::milliseconds timeout);

    Far far;
    Route route;

private:
    static constexpr std::size_t kSmall = 1024, kFewHosts = 64;

    struct Frame;
    using Frames = std::vector<Frame>;
    // Frames of all hosts, that of host mine + i at i, and the messages that will bring them.
    struct Meeting {
        Frames frames;
        std::vector<Far::Handle> letters;
    };

    int leader(std::size_t distance) const;
    Frame of_host(const Call& call, const std::byte* in, std::size_t bytes);
    void prepare();
    Frames gather(const Frame& mine, std::chrono::milliseconds timeout);
    void judge(Frame& verdict, const Frames& frames) const;
    Frame meet(const Call& call, const std::byte* in, std::size_t bytes, std::chrono::milliseconds timeout);

    const Hosts hosts_;
    Room& room_;
    Meeting next_;  // on leaders
    std::uint64_t number_ = 0;
};

}  // namespace dist_prims
