#include "board.h"

#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kLine = 64;
constexpr int kSpins = 2000;     // some microseconds; none when ranks outnumber cores
constexpr auto kYielding = 2ms;  // then sleep
constexpr auto kNap = 50us;
constexpr int kYieldsALook = 64;  // how often to look for errors
constexpr auto kInterruptEvery = 20ms;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "ranks share atomics between processes");

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int cores() {
    cpu_set_t set;
    return ::sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

std::size_t round_up(std::size_t bytes, std::size_t to) {
    return (bytes + to - 1) / to * to;
}

}  // namespace

// What a rank writes and the others read.
struct Board::Post {
    alignas(kLine) std::atomic<std::uint64_t> phase;
    alignas(kLine) Call call[2];  // by phase, like the slots
    alignas(kLine) std::atomic<std::int32_t> pid;
    std::atomic<std::int32_t> left;
};

// Why the group has ended: 0, or kind and culprit of the error that was seen first.
struct Board::Notice {
    alignas(kLine) std::atomic<std::uint64_t> error;
};

// First spin, then give the core away, then sleep.
class Board::Patience {
public:
    explicit Patience(bool crowded) : spins_(crowded ? 0 : kSpins) {}

    // True when it is time to look around.
    bool wait() {
        if (turns_ < spins_) {
            relax();
            ++turns_;
            return false;
        }
        if (began_ == Clock::time_point{}) began_ = Clock::now();
        if (napping_)
            std::this_thread::sleep_for(kNap);
        else
            ::sched_yield();
        if (++turns_ % kYieldsALook != 0) return false;
        napping_ = Clock::now() - began_ > kYielding;
        return true;
    }

private:
    const int spins_;
    int turns_ = 0;
    bool napping_ = false;
    Clock::time_point began_;
};

std::size_t Board::bytes(int size, std::size_t capacity) {
    return sizeof(Notice) + static_cast<std::size_t>(size) * (sizeof(Post) + 2 * round_up(capacity, kLine));
}

Board::Board(std::shared_ptr<const Mapping> memory, int rank, int size, std::size_t capacity)
    : memory_(std::move(memory)), rank_(rank), size_(size), capacity_(round_up(capacity, kLine)), deadline_() {
    if (memory_->size() < bytes(size, capacity))
        throw std::runtime_error("the shared memory is too small for the ranks");
    post(rank).pid.store(static_cast<std::int32_t>(::getpid()), std::memory_order_relaxed);
}

Board::~Board() {
    leave();
}

Board::Notice& Board::notice() const {
    return *reinterpret_cast<Notice*>(memory_->data());
}

Board::Post& Board::post(int rank) const {
    return reinterpret_cast<Post*>(memory_->data() + sizeof(Notice))[rank];
}

std::byte* Board::slot(int rank, std::uint64_t phase) const {
    std::byte* slots = memory_->data() + sizeof(Notice) + static_cast<std::size_t>(size_) * sizeof(Post);
    return slots + (2 * static_cast<std::size_t>(rank) + (phase & 1)) * capacity_;
}

std::byte* Board::mine() {
    return slot(rank_, phase_ + 1);
}

const std::byte* Board::theirs(int rank) const {
    return slot(rank, phase_);
}

void Board::open(const Call& call, std::chrono::milliseconds timeout) {
    call_ = call;
    timeout_ = timeout;
    deadline_ = Clock::time_point{};
    opened_ = true;
    heed_notice();
    post(rank_).call[(phase_ + 1) & 1] = call;
}

void Board::phase() {
    ++phase_;
    post(rank_).phase.store(phase_, std::memory_order_release);
    static const int usable = cores();
    Patience patience(size_ > usable);
    for (int peer = 0; peer < size_; ++peer) {
        while (post(peer).phase.load(std::memory_order_acquire) < phase_) {
            if (patience.wait()) look_around();
        }
    }
    if (opened_) compare();
    opened_ = false;
}

std::uint64_t Board::longest() const {
    std::uint64_t most = 0;
    for (int peer = 0; peer < size_; ++peer) most = std::max(most, post(peer).call[phase_ & 1].longest);
    return most;
}

void Board::compare() const {
    const Call& first = post(0).call[phase_ & 1];
    for (int peer = 1; peer < size_; ++peer) {
        const Call& other = post(peer).call[phase_ & 1];
        if (first.agrees_with(other)) continue;
        throw CommError(
            CommError::Kind::kMismatch,
            "rank " + std::to_string(rank_) + ": ranks disagree, no data was touched. Rank 0 calls " + first.text() +
                "; rank " + std::to_string(peer) + " calls " + other.text() +
                ". Every rank of a group must make the same calls in the same order with the same arguments");
    }
}

void Board::look_around() {
    const auto now = Clock::now();
    if (deadline_ == Clock::time_point{}) deadline_ = now + timeout_;
    heed_notice();
    for (int peer = 0; peer < size_; ++peer) {
        const bool behind = post(peer).phase.load(std::memory_order_acquire) < phase_;
        if (behind && post(peer).left.load(std::memory_order_acquire)) give_up(CommError::Kind::kPeerLeft, peer);
    }
    check_peers();
    if (stopped_.load(std::memory_order_acquire)) give_up(CommError::Kind::kPeerLeft, rank_);
    if (now > deadline_) give_up(CommError::Kind::kTimeout, rank_);
    if (!interrupt_ || now - interrupted_ < kInterruptEvery) return;
    interrupted_ = now;
    try {
        interrupt_();
    } catch (...) {
        give_notice(CommError::Kind::kInterrupted, rank_);
        throw;
    }
}

void Board::watch_peers() {
    for (int peer = 0; peer < size_; ++peer) {
        const auto pid = post(peer).pid.load(std::memory_order_relaxed);
        const bool ours = pid == static_cast<std::int32_t>(::getpid());
        peers_.emplace_back(ours ? -1 : static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    }
}

// A process that ends is seen at once, although whatever it forked keeps its sockets open.
void Board::check_peers() {
    std::vector<pollfd> entries;
    for (const Descriptor& peer : peers_) entries.push_back({peer.get(), POLLIN, 0});
    if (::poll(entries.data(), entries.size(), 0) <= 0) return;
    for (int peer = 0; peer < size_; ++peer) {
        const bool behind = post(peer).phase.load(std::memory_order_acquire) < phase_;
        if (behind && entries[static_cast<std::size_t>(peer)].revents) give_up(CommError::Kind::kPeerDied, peer);
    }
}

void Board::heed_notice() {
    if (const std::uint64_t error = notice().error.load(std::memory_order_acquire)) {
        give_up(static_cast<CommError::Kind>(error >> 32), static_cast<int>(error & 0xFFFFFFFFu) - 1);
    }
}

// The first error is the one that all ranks tell.
void Board::give_notice(CommError::Kind kind, int culprit) {
    std::uint64_t none = 0;
    const std::uint64_t error = (static_cast<std::uint64_t>(kind) << 32) | static_cast<std::uint32_t>(culprit + 1);
    notice().error.compare_exchange_strong(none, error, std::memory_order_acq_rel);
}

void Board::give_up(CommError::Kind kind, int culprit) {
    give_notice(kind, culprit);
    throw CommError(kind, complaint(kind, culprit));
}

std::string Board::complaint(CommError::Kind kind, int culprit) const {
    const std::string who = "rank " + std::to_string(culprit), what = " in " + call_.text();
    const std::string here = "rank " + std::to_string(rank_) + ": ";
    switch (kind) {
        case CommError::Kind::kPeerDied:
            return here + who + " (process " + std::to_string(post(culprit).pid.load()) + ") has died" + what +
                   "; look at what it printed last, and start the group anew";
        case CommError::Kind::kPeerLeft:
            return here + who + " has left the group" + what + "; every rank must make the same calls before it leaves";
        case CommError::Kind::kInterrupted:
            return here + who + " was interrupted" + what + "; the group cannot go on";
        default:
            if (culprit != rank_) return here + who + " has given up waiting in an earlier call; start the group anew";
            return here + "timeout after " + std::to_string(timeout_.count()) + " ms" + what + ": " + late();
    }
}

std::string Board::late() const {
    std::string text;
    for (int peer = 0; peer < size_; ++peer) {
        if (post(peer).phase.load(std::memory_order_acquire) >= phase_) continue;
        text += (text.empty() ? "no sign of rank " : ", ") + std::to_string(peer);
    }
    return text;
}

void Board::leave() {
    post(rank_).left.store(1, std::memory_order_release);
}

}  // namespace dist_prims
