#include "span.h"

#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace dist_prims {

std::vector<int> Hosts::seats() const {
    std::size_t size = 0;
    for (const auto& each : ranks) size += each.size();
    std::vector<int> found(size, -1);
    for (std::size_t seat = 0; seat < ranks[mine].size(); ++seat)
        found[static_cast<std::size_t>(ranks[mine][seat])] = static_cast<int>(seat);
    return found;
}

std::vector<int> Hosts::strangers() const {
    std::vector<int> found;
    for (std::size_t host = 0; host < ranks.size(); ++host) {
        if (host != mine) found.insert(found.end(), ranks[host].begin(), ranks[host].end());
    }
    return found;
}

// What a leader says for its host: what its ranks call, two calls if they differ, and the sum of their data.
struct Span::Frame {
    Call call, other;
    std::int32_t rank = -1, other_rank = -1;  // of these calls; -1: there is none
    alignas(Peers::kLine) std::byte data[kSmall] = {};
};

static_assert(sizeof(Call) * 2 + 2048 < Span::kLeastSlot);

Span::Span(Hosts hosts, Room& room, std::unique_ptr<Engine> engine)
    : far(std::move(engine), room.peers, hosts.strangers()),
      route(room.mail, hosts.seats(), &far),
      hosts_(std::move(hosts)),
      room_(room) {
    if (room.board.rank() == 0) prepare();
}

Span::~Span() {
    for (const auto& letter : next_.letters) Far::let_go(letter);
}

// The leader of the host so far on.
int Span::leader(std::size_t distance) const {
    return hosts_.ranks[(hosts_.mine + distance) % hosts_.ranks.size()].front();
}

// Ask for what the other leaders will say at the next meeting.
void Span::prepare() {
    const std::size_t hosts = hosts_.ranks.size();
    next_ = {Frames(hosts), {}};
    for (std::size_t have = 1; have < hosts; have *= 2) {
        auto* place = reinterpret_cast<std::byte*>(&next_.frames[have]);
        const std::size_t bytes = std::min(have, hosts - have) * sizeof(Frame);
        next_.letters.push_back(far.receive(leader(have), number_, place, bytes, std::chrono::milliseconds::zero()));
    }
}

// After the first phase, in which the ranks of this host have posted their calls and data.
Span::Frame Span::of_host(const Call& call, const std::byte* in, std::size_t bytes) {
    const Board& board = room_.board;
    Frame frame;
    frame.call = call;
    frame.rank = room_.peers.number(0);
    if (const int peer = board.differs(); peer >= 0) {
        frame.other = board.call(peer);
        frame.other_rank = room_.peers.number(peer);
    } else if (bytes) {
        std::vector<const void*> each{in};
        for (int peer = 1; peer < board.size(); ++peer) each.push_back(board.theirs(peer));
        fold(call.op, call.dtype, frame.data, each.data(), board.size(), call.count);
    }
    return frame;
}

// The frames of all hosts, by host: Bruck's all-gather among the leaders. In each round they hold twice as many.
Span::Frames Span::gather(const Frame& mine, std::chrono::milliseconds timeout) {
    const std::size_t hosts = hosts_.ranks.size();
    Meeting now = std::move(next_);
    const std::uint64_t number = number_;
    number_ += 2;
    const auto began = Clock::now();
    now.frames[0] = mine;
    std::vector<Far::Handle> sent;
    try {
        for (std::size_t have = 1, round = 0; have < hosts; have *= 2, ++round) {
            const std::size_t bytes = std::min(have, hosts - have) * sizeof(Frame);
            const auto* from = reinterpret_cast<const std::byte*>(now.frames.data());
            sent.push_back(far.send(leader(hosts - have), number, from, bytes, timeout));
            if (round == 0) prepare();  // there is time for it: the others are on their way
            far.wait(now.letters[round], timeout, began);
        }
        for (const auto& letter : sent) far.wait(letter);
    } catch (...) {
        far.end();
        throw;
    }
    const auto first = now.frames.begin();
    std::rotate(first, first + static_cast<std::ptrdiff_t>((hosts - hosts_.mine) % hosts), now.frames.end());
    return std::move(now.frames);
}

// The first two calls that differ, if any do.
void Span::judge(Frame& verdict, const Frames& frames) const {
    verdict.call = frames[0].call;
    verdict.rank = frames[0].rank;
    verdict.other_rank = -1;
    for (const Frame& frame : frames) {
        const bool itself = !frame.call.agrees_with(verdict.call);
        if (!itself && frame.other_rank < 0) continue;
        verdict.other = itself ? frame.call : frame.other;
        verdict.other_rank = itself ? frame.rank : frame.other_rank;
        return;
    }
}

Span::Frame Span::meet(const Call& call, const std::byte* in, std::size_t bytes, std::chrono::milliseconds timeout) {
    Board& board = room_.board;
    board.open(call, timeout + Far::kAfterOthers, false);
    if (bytes) std::memcpy(board.mine(), in, bytes);
    board.phase();
    Frame verdict;
    if (board.rank() == 0) {
        const Frames frames = gather(of_host(call, in, bytes), timeout);
        judge(verdict, frames);
        if (verdict.other_rank < 0 && bytes) {
            std::vector<const void*> each;
            for (const Frame& frame : frames) each.push_back(frame.data);
            fold(call.op, call.dtype, verdict.data, each.data(), static_cast<int>(each.size()), call.count);
        }
        std::memcpy(board.mine(), &verdict, sizeof(verdict));
        board.phase();
    } else {
        const InBackground sleeping;  // the leader waits for the network, and needs the core for it
        board.renew();                // he has all of his time, though this rank may have come early
        board.phase();
    }
    std::memcpy(&verdict, board.theirs(0), sizeof(verdict));
    if (verdict.other_rank >= 0)
        disagree(room_.peers.number(board.rank()), verdict.rank, verdict.call, verdict.other_rank, verdict.other);
    return verdict;
}

void Span::agree(const Call& call, std::chrono::milliseconds timeout) {
    meet(call, nullptr, 0, timeout);
}

void Span::all_reduce(const Call& call, const std::byte* in, std::byte* out, std::chrono::milliseconds timeout) {
    const std::size_t bytes = call.count * size_of(call.dtype);
    const Frame verdict = meet(call, in, bytes, timeout);
    if (bytes) std::memcpy(out, verdict.data, bytes);
    if (call.op == Op::kAvg) divide(call.dtype, out, static_cast<int>(hosts_.seats().size()), call.count);
}

}  // namespace dist_prims
