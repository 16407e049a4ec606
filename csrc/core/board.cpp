#include "board.h"

#include <algorithm>
#include <utility>

namespace dist_prims {
namespace {

std::size_t round_up(std::size_t bytes) {
    return (bytes + Peers::kLine - 1) / Peers::kLine * Peers::kLine;
}

}  // namespace

// What a rank writes and the others read.
struct Board::Post {
    alignas(Peers::kLine) std::atomic<std::uint64_t> phase;
    alignas(Peers::kLine) Call call[2];  // by phase, like the slots
};

std::size_t Board::bytes(int size, std::size_t capacity) {
    return static_cast<std::size_t>(size) * (sizeof(Post) + 2 * round_up(capacity));
}

Board::Board(std::shared_ptr<const Mapping> memory, std::byte* place, Peers& peers, std::size_t capacity)
    : memory_(std::move(memory)), place_(place), peers_(peers), capacity_(round_up(capacity)) {}

Board::Post& Board::post(int rank) const {
    return reinterpret_cast<Post*>(place_)[rank];
}

std::byte* Board::slot(int rank, std::uint64_t phase) const {
    std::byte* slots = place_ + static_cast<std::size_t>(size()) * sizeof(Post);
    return slots + (2 * static_cast<std::size_t>(rank) + (phase & 1)) * capacity_;
}

std::byte* Board::mine() {
    return slot(rank(), phase_ + 1);
}

const std::byte* Board::theirs(int rank) const {
    return slot(rank, phase_);
}

const Call& Board::call(int rank) const {
    return post(rank).call[phase_ & 1];
}

void Board::open(const Call& call, std::chrono::milliseconds timeout, bool compares) {
    call_ = call;
    timeout_ = timeout;
    deadline_ = Clock::time_point{};
    compares_ = compares;
    peers_.heed([this] { return call_.text(); });
    post(rank()).call[(phase_ + 1) & 1] = call;
}

bool Board::behind(int rank) const {
    return post(rank).phase.load() < phase_;
}

bool Board::anyone_behind() const {
    for (int peer = 0; peer < size(); ++peer) {
        if (behind(peer)) return true;
    }
    return false;
}

void Board::phase() {
    ++phase_;
    peers_.note_core();
    post(rank()).phase.store(phase_);
    if (!anyone_behind()) {  // the last one to come wakes those who sleep
        for (int peer = 0; peer < size(); ++peer) peers_.ring(peer);
    }
    Patience patience(peers_);
    for (int peer = 0; peer < size(); ++peer) {
        while (behind(peer)) {
            const bool shares_core = peers_.shares_core(peer, [this](int each) { return behind(each); });
            if (patience.wait(shares_core, [this] { return !anyone_behind(); })) look_around();
            peers_.note_core();
        }
    }
    if (std::exchange(compares_, false)) {
        if (const int peer = differs(); peer >= 0) disagree(rank(), 0, call(0), peer, call(peer));
    }
}

std::uint64_t Board::longest() const {
    std::uint64_t most = 0;
    for (int peer = 0; peer < size(); ++peer) most = std::max(most, call(peer).longest);
    return most;
}

int Board::loans() const {
    int found = 0;
    for (int peer = 0; peer < size(); ++peer) found += call(peer).loan.inode != 0;
    return found;
}

int Board::differs() const {
    for (int peer = 1; peer < size(); ++peer) {
        if (!call(0).agrees_with(call(peer))) return peer;
    }
    return -1;
}

void disagree(int rank, int one, const Call& calls, int other, const Call& differs) {
    const auto text = [](int who, const Call& call) { return "ank " + std::to_string(who) + " calls " + call.text(); };
    throw CommError(CommError::Kind::kMismatch,
                    "rank " + std::to_string(rank) + ": ranks disagree, no data was touched. R" + text(one, calls) +
                        "; r" + text(other, differs) +
                        ". Every rank of a group must make the same calls in the same order with the same arguments");
}

void Board::look_around() {
    const auto now = Clock::now();
    if (deadline_ == Clock::time_point{}) deadline_ = now + timeout_;
    peers_.look_around([this](int peer) { return behind(peer); }, [this] { return call_.text(); });
    if (now > deadline_)
        peers_.give_up_waiting(std::to_string(timeout_.count()) + " ms in " + call_.text() + ": " + late());
}

std::string Board::late() const {
    std::string text;
    for (int peer = 0; peer < size(); ++peer) {
        if (behind(peer)) text += (text.empty() ? "no sign of rank " : ", ") + std::to_string(peers_.number(peer));
    }
    return text;
}

}  // namespace dist_prims
