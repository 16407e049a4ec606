#include "peers.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <limits>

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr int kSpins = 5000, kSpinsInBackground = 100;  // some tens of microseconds, and a few
constexpr int kYields = 20;
constexpr Clock::duration kLongYield = 500us;  // no rank keeps the core for so long between two small calls
constexpr Clock::duration kFirstBan = 1ms,
                          kLongestBan = 64ms;  // twice as long after each long yield, until a short one
constexpr auto kDoze = 10ms;
constexpr auto kInterruptEvery = 20ms;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

// What a rank says of itself.
struct Peers::Post {
    alignas(kLine) std::atomic<std::int32_t> pid;
    std::atomic<std::int32_t> left;
    std::atomic<std::int32_t> core;
    alignas(kLine) std::atomic<std::uint32_t> bell;
    std::atomic<std::uint32_t> sleepers;
};

// Why the group has ended: 0, or kind and culprit of the error that was seen first.
struct Peers::Slate {
    alignas(kLine) std::atomic<std::uint64_t> error;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "ranks share atomics between processes");

std::size_t Peers::bytes(int size) {
    return sizeof(Slate) + static_cast<std::size_t>(size) * sizeof(Post);
}

Peers::Peers(std::shared_ptr<const Mapping> memory, std::byte* place, int rank, int size, Names names)
    : memory_(std::move(memory)), place_(place), rank_(rank), size_(size), names_(std::move(names)) {
    post(rank).pid.store(static_cast<std::int32_t>(::getpid()), std::memory_order_relaxed);
}

Peers::~Peers() {
    leave();
}

Peers::Slate& Peers::slate() const {
    return *reinterpret_cast<Slate*>(place_);
}

Peers::Post& Peers::post(int rank) const {
    return reinterpret_cast<Post*>(place_ + sizeof(Slate))[rank];
}

int Peers::process(int rank) const {
    return post(rank).pid.load(std::memory_order_relaxed);
}

int Peers::number(int rank) const {
    return names_.numbers.empty() ? rank : names_.numbers[static_cast<std::size_t>(rank)];
}

std::string Peers::title(int number) const {
    return names_.titles.empty() ? "rank " + std::to_string(number) : names_.titles[static_cast<std::size_t>(number)];
}

void Peers::note_core() {
    const int here = ::sched_getcpu();
    if (here == core_.load(std::memory_order_relaxed)) return;  // the others keep what they have read of it
    core_.store(here, std::memory_order_relaxed);
    post(rank_).core.store(here, std::memory_order_relaxed);
}

int Peers::core(int rank) const {
    return post(rank).core.load(std::memory_order_relaxed);
}

unsigned Peers::listen() {
    core_.store(kNowhere, std::memory_order_relaxed);  // until note_core(): it may wake on any
    post(rank_).core.store(kNowhere, std::memory_order_relaxed);
    post(rank_).sleepers.fetch_add(1);
    return post(rank_).bell.load();
}

void Peers::doze(unsigned heard) {
    const timespec limit{0, std::chrono::nanoseconds(kDoze).count()};
    ::syscall(SYS_futex, &post(rank_).bell, FUTEX_WAIT, heard, &limit, nullptr, 0);
}

void Peers::stop_listening() {
    post(rank_).sleepers.fetch_sub(1);
}

void Peers::ring(int rank) const {
    Post& of = post(rank);
    if (of.sleepers.load() == 0) return;
    of.bell.fetch_add(1);
    ::syscall(SYS_futex, &of.bell, FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

void Peers::leave() {
    post(rank_).left.store(1, std::memory_order_release);
}

bool Peers::has_left(int rank) const {
    return post(rank).left.load(std::memory_order_acquire) != 0;
}

void Peers::watch() {
    for (int peer = 0; peer < size_; ++peer) {
        const auto pid = post(peer).pid.load(std::memory_order_relaxed);
        const bool ours = pid == static_cast<std::int32_t>(::getpid());
        processes_.emplace_back(ours ? -1 : static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    }
}

std::optional<Peers::Notice> Peers::notice() const {
    const std::uint64_t error = slate().error.load(std::memory_order_acquire);
    if (error == 0) return std::nullopt;
    return Notice{static_cast<CommError::Kind>(error >> 32), static_cast<int>(error & 0xFFFFFFFFu) - 1};
}

void Peers::heed(const What& what) const {
    if (const auto found = notice()) give_up(found->kind, found->culprit, what);
}

void Peers::look_around(const std::function<bool(int)>& awaited, const What& what) {
    heed(what);
    if (told_) tell_of(awaited);
    for (int peer = 0; peer < size_; ++peer) {
        if (has_left(peer) && awaited(peer))  // asked in this order: what it said before it left has come by now
            give_up(CommError::Kind::kPeerLeft, number(peer), what);
    }
    if (const int culprit = ended_process(awaited); culprit >= 0) give_up(CommError::Kind::kPeerDied, culprit, what);
    if (stopped_.load(std::memory_order_acquire)) give_up(CommError::Kind::kPeerLeft, number(rank_), what);
    const auto now = Clock::now().time_since_epoch().count();
    if (!interrupt_ || now - interrupted_.load(std::memory_order_relaxed) < Clock::duration(kInterruptEvery).count())
        return;
    interrupted_.store(now, std::memory_order_relaxed);
    try {
        interrupt_();
    } catch (...) {
        give_notice(CommError::Kind::kInterrupted, number(rank_));
        throw;
    }
}

void Peers::tell_of(const std::function<bool(int)>& awaited) const {
    for (int peer = 0; peer < size_; ++peer) {
        if (peer != rank_ && awaited(peer)) return told_(number(peer));
    }
}

// A process that ends is seen at once, although whatever it forked keeps its sockets open.
int Peers::ended_process(const std::function<bool(int)>& awaited) const {
    std::vector<pollfd> entries;
    for (const Descriptor& process : processes_) entries.push_back({process.get(), POLLIN, 0});
    if (::poll(entries.data(), entries.size(), 0) <= 0) return -1;
    for (int peer = 0; peer < size_; ++peer) {
        if (entries[static_cast<std::size_t>(peer)].revents && awaited(peer)) return number(peer);
    }
    return -1;
}

int Peers::dead() const {
    return ended_process([this](int peer) { return !has_left(peer); });
}

void Peers::give_notice(CommError::Kind kind, int culprit) const {
    std::uint64_t none = 0;
    const std::uint64_t error = (static_cast<std::uint64_t>(kind) << 32) | static_cast<std::uint32_t>(culprit + 1);
    slate().error.compare_exchange_strong(none, error, std::memory_order_acq_rel);
}

void Peers::give_up(CommError::Kind kind, int culprit, const What& what) const {
    give_notice(kind, culprit);
    throw CommError(kind, complaint(kind, culprit, what()));
}

void Peers::give_up_waiting(const std::string& what) const {
    give_notice(CommError::Kind::kTimeout, number(rank_));
    throw CommError(CommError::Kind::kTimeout, "rank " + std::to_string(number(rank_)) + ": timeout after " + what);
}

// The process of a rank of this host, or 0.
int Peers::process_of(int culprit) const {
    for (int peer = 0; peer < size_; ++peer) {
        if (number(peer) == culprit) return process(peer);
    }
    return 0;
}

std::string Peers::complaint(CommError::Kind kind, int culprit, const std::string& what) const {
    const std::string who = "rank " + std::to_string(number(rank_)) + ": " + title(culprit);
    const int pid = process_of(culprit);
    switch (kind) {
        case CommError::Kind::kPeerDied:
            return who + (pid ? " (process " + std::to_string(pid) + ") has died" : " is gone, it has died or left,") +
                   " in " + what + "; look at what it printed last, and start the group anew";
        case CommError::Kind::kPeerLeft:
            return who + " has left the group in " + what + "; every rank must make the same calls before it leaves";
        case CommError::Kind::kInterrupted:
            return who + " was interrupted in " + what + "; the group cannot go on";
        case CommError::Kind::kLost:
            return who + " was not heard of in time in " + what +
                   "; see whether it is busy or waits elsewhere, and whether its host and the link are up";
        default:
            return who + " has given up waiting in an earlier call; start the group anew before " + what;
    }
}

bool Patience::spin(bool shares_core) {
    if (shares_core || spins_ >= (in_background ? kSpinsInBackground : kSpins)) return false;
    relax();
    ++spins_;
    return true;
}

bool Patience::yield() {
    const auto before = Clock::now().time_since_epoch().count();
    if (in_background || yields_ >= kYields || before < peers_->yield_again_.load(std::memory_order_relaxed))
        return false;
    ++yields_;
    ::sched_yield();
    const auto after = Clock::now().time_since_epoch().count();
    Clock::rep ban = kFirstBan.count();
    if (after - before > kLongYield.count()) {
        ban = std::max(peers_->ban_.load(std::memory_order_relaxed), kFirstBan.count());
        peers_->yield_again_.store(after + ban, std::memory_order_relaxed);
        ban = std::min(2 * ban, kLongestBan.count());
    }
    peers_->ban_.store(ban, std::memory_order_relaxed);
    return true;
}

}  // namespace dist_prims
