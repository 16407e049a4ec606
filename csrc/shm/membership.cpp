#include "membership.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <utility>

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr auto kLongestSleep = 10ms;
constexpr auto kInterruptEvery = 20ms;
// How a notice is packed into a word: the kind, then the other rank and the culprit, each plus 1.
constexpr int kRankBits = 28;
constexpr std::uint64_t kRankMask = (std::uint64_t{1} << kRankBits) - 1;

// When this thread last ran the hook of on_wait(). The time belongs to the thread and not to the rank: Python runs
// signal handlers on its main thread only, and a progress thread that checks for failures would otherwise delay the
// check of the main thread.
thread_local Clock::rep last_interrupt = 0;

std::string firewall_text() {
    const char* const ports = std::getenv("DIST_PRIMS_PORTS");
    const std::string range = ports && *ports ? std::string("the ports DIST_PRIMS_PORTS=") + ports + " pass"
                                              : "the ports of a range pass, and set DIST_PRIMS_PORTS to it";
    return "a firewall that closes the ports at which the ranks listen: let " + range;
}

}  // namespace

// The state that a rank publishes. Other ranks write only the wake count.
struct Membership::RankState {
    alignas(kCacheLine) std::atomic<std::int32_t> pid;
    std::atomic<std::uint64_t> pid_namespace;  // 0: not known, and the pid is not valid
    std::atomic<std::int32_t> left;
    std::atomic<std::int32_t> core;                             // on which the rank last ran, or kNowhere
    alignas(kCacheLine) std::atomic<std::uint32_t> wake_count;  // calls of wake() for the rank
    std::atomic<std::uint32_t> sleepers;                        // threads of the rank in sleep()
};

struct Membership::GroupState {
    alignas(kCacheLine) std::atomic<std::uint64_t> error;  // the first notice; 0: the group has not ended
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "ranks share atomics between processes");

std::size_t Membership::bytes(int size) {
    return sizeof(GroupState) + static_cast<std::size_t>(size) * sizeof(RankState) + WaitGraph::bytes(size);
}

void Membership::set_counters(std::byte* place, int size, std::uint32_t wakes, std::uint64_t heartbeats) {
    for (int rank = 0; rank < size; ++rank)
        reinterpret_cast<RankState*>(place + sizeof(GroupState))[rank].wake_count.store(wakes);
    WaitGraph::set_heartbeats(place + bytes(size) - WaitGraph::bytes(size), size, heartbeats);
}

Membership::Membership(std::shared_ptr<const Mapping> memory, std::byte* place, int rank, int size, RankNames names)
    : memory_(std::move(memory)),
      place_(place),
      rank_(rank),
      size_(size),
      names_(std::move(names)),
      wait_graph_(place + bytes(size) - WaitGraph::bytes(size), rank, size) {
    rank_state(rank).pid.store(static_cast<std::int32_t>(::getpid()), std::memory_order_relaxed);
    rank_state(rank).pid_namespace.store(pid_namespace(), std::memory_order_release);
}

Membership::GroupState& Membership::group_state() const {
    return *reinterpret_cast<GroupState*>(place_);
}

Membership::RankState& Membership::rank_state(int rank) const {
    return reinterpret_cast<RankState*>(place_ + sizeof(GroupState))[rank];
}

int Membership::process(int rank) const {
    // Acquire: the pid is stored before its namespace.
    const auto its_namespace = rank_state(rank).pid_namespace.load(std::memory_order_acquire);
    const auto own_namespace = rank_state(rank_).pid_namespace.load(std::memory_order_relaxed);
    const bool is_valid = its_namespace != 0 && its_namespace == own_namespace;
    return is_valid ? rank_state(rank).pid.load(std::memory_order_relaxed) : 0;
}

void Membership::note_core() {
    const int core = ::sched_getcpu();
    if (core == core_.load(std::memory_order_relaxed)) return;  // the line stays in the caches of the other ranks
    core_.store(core, std::memory_order_relaxed);
    rank_state(rank_).core.store(core, std::memory_order_relaxed);
}

int Membership::core(int rank) const {
    return rank_state(rank).core.load(std::memory_order_relaxed);
}

// Registers a sleeper; returns the wake count, from which on futex_wait() notices a wake-up.
unsigned Membership::begin_sleep() {
    core_.store(kNowhere, std::memory_order_relaxed);  // until note_core(): the thread may wake up on any core
    rank_state(rank_).core.store(kNowhere, std::memory_order_relaxed);
    rank_state(rank_).sleepers.fetch_add(1);
    return rank_state(rank_).wake_count.load();
}

// Sleeps, unless the wake count has changed since it was `seen`.
void Membership::futex_wait(unsigned seen) {
    const timespec limit{0, std::chrono::nanoseconds(kLongestSleep).count()};
    ::syscall(SYS_futex, &rank_state(rank_).wake_count, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void Membership::end_sleep() {
    rank_state(rank_).sleepers.fetch_sub(1);
}

void Membership::wake(int rank) const {
    RankState& state = rank_state(rank);
    if (state.sleepers.load() == 0) return;
    state.wake_count.fetch_add(1);
    ::syscall(SYS_futex, &state.wake_count, FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

void Membership::leave() {
    rank_state(rank_).left.store(1, std::memory_order_release);
}

bool Membership::has_left(int rank) const {
    return rank_state(rank).left.load(std::memory_order_acquire) != 0;
}

std::optional<Membership::Notice> Membership::notice() const {
    const std::uint64_t error = group_state().error.load(std::memory_order_acquire);
    if (error == 0) return std::nullopt;
    return Notice{static_cast<CommError::Kind>(error >> (2 * kRankBits)), static_cast<int>(error & kRankMask) - 1,
                  static_cast<int>((error >> kRankBits) & kRankMask) - 1};
}

void Membership::check_abort(const What& what) const {
    if (const auto first = notice()) throw CommError(first->kind, error_text(*first, what()), true);
}

void Membership::check_failures(const std::function<bool(int)>& awaited, const What& what) {
    // 1. The group: another rank, or a rank on another host, may have ended it.
    wait_graph_.heartbeat();
    check_abort(what);
    if (spans_hosts()) run_awaited_hook(awaited);
    // 2. The awaited ranks. awaited() is called last: what a rank has posted before it left or died is visible then. A
    // death comes first: other ranks may have left because of it.
    const auto died = ended_processes([&](int peer) { return !has_left(peer) && awaited(peer); });
    if (!died.empty()) throw_failure({CommError::Kind::kPeerDied, died.front()}, what);
    for (int peer = 0; peer < size_; ++peer) {
        if (has_left(peer) && awaited(peer)) throw_failure({CommError::Kind::kPeerLeft, group_rank(peer)}, what);
    }
    // 3. This rank: another thread may have called stop(), and the hook runs signal handlers.
    check_stop(what);
    const auto now = Clock::now().time_since_epoch().count();
    if (!interrupt_ || now - last_interrupt < Clock::duration(kInterruptEvery).count()) return;
    last_interrupt = now;
    try {
        interrupt_();
    } catch (...) {
        give_notice({CommError::Kind::kInterrupted, group_rank(rank_)});
        throw;
    }
    check_stop(what);  // a signal handler may have destroyed the group
}

void Membership::check_stop(const What& what) const {
    if (stopped_.load(std::memory_order_acquire)) throw_failure({CommError::Kind::kPeerLeft, group_rank(rank_)}, what);
}

// Calls the hook of on_awaited() with one awaited rank.
void Membership::run_awaited_hook(const std::function<bool(int)>& awaited) const {
    for (int peer = 0; peer < size_; ++peer) {
        if (peer != rank_ && awaited(peer)) return awaited_hook_(group_rank(peer));
    }
}

// The group ranks of the awaited ranks whose processes have ended. An exit descriptor reports that at once, even if
// forked children of the process keep its sockets open.
std::vector<int> Membership::ended_processes(const std::function<bool(int)>& awaited) const {
    std::vector<pollfd> entries;
    for (const ExitDescriptor& exit : exits_) entries.push_back({exit ? exit->get() : -1, POLLIN, 0});
    const int ready = uninterrupted([&] { return ::poll(entries.data(), entries.size(), 0); });
    if (ready < 0) throw_errno("watching the processes of other ranks");
    std::vector<int> ended;
    for (int peer = 0; ready > 0 && peer < size_; ++peer) {
        if (entries[static_cast<std::size_t>(peer)].revents && awaited(peer)) ended.push_back(group_rank(peer));
    }
    return ended;
}

int Membership::dead_rank() const {
    const auto ended = ended_processes([this](int peer) { return !has_left(peer); });
    return ended.empty() ? -1 : ended.front();
}

std::vector<int> Membership::named_ranks() const {
    const auto first = notice();
    if (!first || first->other >= 0) return {};  // with `other` a link has failed, or one of two ranks
    if (first->kind == CommError::Kind::kPeerDied || first->kind == CommError::Kind::kLost ||
        first->kind == CommError::Kind::kExhausted)
        return {first->culprit};
    if (first->kind != CommError::Kind::kTimeout) return {};
    const WaitGraph::Verdict verdict = verdict_of(first->culprit);
    if (verdict.is_deadlock) return {};
    std::vector<int> ranks;
    for (const WaitGraph::Late& late : verdict.entries()) {
        if (late.rank >= 0) ranks.push_back(late.rank);
    }
    return ranks;
}

std::vector<int> Membership::doubtful_ranks() const {
    const auto first = notice();
    if (!first || first->kind != CommError::Kind::kSilent) return {};
    return {first->culprit, first->other};
}

bool Membership::give_notice(const Notice& notice) const {
    std::uint64_t none = 0;
    const std::uint64_t error = (static_cast<std::uint64_t>(notice.kind) << (2 * kRankBits)) |
                                (static_cast<std::uint64_t>(notice.other + 1) << kRankBits) |
                                static_cast<std::uint64_t>(notice.culprit + 1);
    return group_state().error.compare_exchange_strong(none, error, std::memory_order_acq_rel);
}

void Membership::throw_failure(const Notice& notice, const What& what) const {
    give_notice(notice);
    throw CommError(notice.kind, error_text(notice, what()));
}

// The error names the late ranks of the first notice: ranks that give up at the same time name the same ranks.
void Membership::throw_timeout(const std::string& what, const WaitGraph::Verdict& late) {
    {
        const std::lock_guard lock(verdict_guard_);
        if (!std::exchange(has_verdict_, true)) wait_graph_.write_verdict(late);
    }
    give_notice({CommError::Kind::kTimeout, group_rank(rank_)});
    const Notice first = *notice();
    if (first.kind != CommError::Kind::kTimeout) check_abort([&] { return what; });
    const std::string late_ranks = verdict_text(verdict_of(first.culprit));
    throw CommError(CommError::Kind::kTimeout,
                    own_name() + ": timeout after " + what + (late_ranks.empty() ? "" : ": " + late_ranks));
}

// The verdict of the rank that has timed out: empty in a group that spans hosts, where no rank writes one.
WaitGraph::Verdict Membership::verdict_of(int culprit) const {
    return spans_hosts() ? WaitGraph::Verdict{} : wait_graph_.verdict(culprit);
}

// Which ranks are late, and where they are; empty if that is not known.
std::string Membership::verdict_text(const WaitGraph::Verdict& late) const {
    if (late.count == 0) return "";
    const auto entries = late.entries();
    std::string ranks;
    for (std::size_t index = 0; index < entries.size(); ++index) {
        const std::string rank = late_rank_text(entries[index].rank);
        ranks += (index ? ", " : "") + (late.is_deadlock ? "rank " + rank + " waits for rank " : rank);
        if (late.is_deadlock) ranks += late_rank_text(entries[(index + 1) % entries.size()].rank);
    }
    if (late.count > entries.size()) ranks += " and " + std::to_string(late.count - entries.size()) + " more";
    if (late.is_deadlock) return "deadlock, " + ranks + "; change the order of their calls";
    return "no sign of rank " + ranks + location_text(entries[0], late.count);
}

std::string Membership::late_rank_text(int late) const {
    return late < 0 ? "in another group, process " + std::to_string(-late) : std::to_string(late);
}

// Where `ranks` late ranks are; `late` is the first of them.
std::string Membership::location_text(const WaitGraph::Late& late, std::size_t ranks) const {
    const std::string call = "call number " + std::to_string(late.number), be = ranks > 1 ? "are " : "is ";
    std::string location = be + "blocked in no call";
    if (late.state == WaitGraph::LateState::kHasNotMadeCall)
        location = (ranks > 1 ? "have" : "has") + (" not made " + call);
    if (late.state == WaitGraph::LateState::kIsInCall) location = be + "in " + call + " and waits for no rank";
    const int pid = late.rank < 0 ? -late.rank : process(late.rank);
    const std::string command = pid ? ": py-spy dump --pid " + std::to_string(pid) : "";
    return ", which " + location + "; see what it does" + command;
}

// -1: the rank is on another host.
int Membership::local_rank(int group_rank) const {
    int rank = size_ - 1;
    while (rank >= 0 && this->group_rank(rank) != group_rank) --rank;
    return rank;
}

// How a rank was lost: with its pid, where the pid is valid in this PID namespace. Of a rank on another host only the
// lost connection is known.
std::string Membership::loss_text(int culprit) const {
    const int rank = local_rank(culprit), pid = rank < 0 ? 0 : process(rank);
    if (rank < 0) return " is gone, it has died or left,";
    return (pid ? " (process " + std::to_string(pid) + ")" : "") + std::string(" has died");
}

std::string Membership::error_text(const Notice& notice, const std::string& what) const {
    const auto [kind, culprit, other] = notice;
    const std::string ranks = own_name() + ": " + title(culprit);
    const bool is_on_this_host = local_rank(culprit) >= 0 && (other < 0 || local_rank(other) >= 0);
    const bool is_first_contact = is_being_made_ && !is_on_this_host;
    switch (kind) {
        case CommError::Kind::kPeerDied:
            if (is_first_contact)
                return ranks + " cannot be reached, in " + what + "; see whether its process has ended, and look for " +
                       firewall_text();
            if (culprit == group_rank(rank_))
                return own_name() + ": another rank has lost the connection with this rank in " + what +
                       "; see the error of that rank and whether the link is up, and create the group again";
            return ranks + loss_text(culprit) + " in " + what + "; see its last output, and create the group again";
        case CommError::Kind::kPeerLeft:
            if (culprit == group_rank(rank_))
                return own_name() + ": the group was destroyed or aborted on this rank in " + what;
            if (const int dead = dead_rank(); dead >= 0)
                return ranks + " has left the group in " + what + ", and " + title(dead) + loss_text(dead) +
                       "; see the last output of both, and create the group again";
            return ranks + " has left the group in " + what + "; every rank must make the same calls before it leaves";
        case CommError::Kind::kInterrupted:
            return ranks + " was interrupted and has ended the group, while this rank was in " + what +
                   "; create the group again";
        case CommError::Kind::kLost:
            if (other >= 0)
                return own_name() + ": no rank is late, but the ranks wait for each other in a circle, " +
                       title(culprit) + " for " + title(other) + ", in " + what +
                       "; see whether their sends and receives match, and whether the link between them delivers";
            return ranks + " has not replied in time in " + what +
                   "; see whether it is busy or waits elsewhere, and whether its host and the link are up" +
                   (is_first_contact ? "; look for " + firewall_text() : "");
        case CommError::Kind::kSilent:
            return ranks + " has not replied to " + title(other) + " in time, in " + what +
                   "; see whether it is busy, and whether the hosts of both are up and the link between them delivers" +
                   (is_first_contact ? "; look for " + firewall_text() : "");
        case CommError::Kind::kUnreachable:
            return own_name() + ": no rank is late, but " + title(culprit) + " cannot be reached from " + title(other) +
                   ": the link between their hosts does not deliver, or a host is down, in " + what +
                   "; see the interfaces, routes, firewalls and MTU of both, or " +
                   (is_first_contact ? "look for " + firewall_text()
                                     : "go on without one of them by dist_prims.shrink()");
        case CommError::Kind::kExhausted:
            return ranks + " has no file descriptor left for a connection, or no port, in " + what +
                   "; raise the limit of that rank (ulimit -n, or net.ipv4.ip_local_port_range), or look for what it "
                   "does not close";
        default:
            return ranks + " has given up waiting " + awaited_text(culprit) + "; create the group again before " + what;
    }
}

// For what the rank that has timed out was waiting.
std::string Membership::awaited_text(int culprit) const {
    const WaitGraph::Verdict late = verdict_of(culprit);
    if (!late.is_deadlock && late.has(rank_)) return "for this rank";
    return late.count ? std::string("(").append(verdict_text(late)).append(")") : "in an earlier call";
}

}  // namespace dist_prims
