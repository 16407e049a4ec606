#include "thread_team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "process.h"
#include "streaming.h"
#include "thread.h"

namespace dist_prims {

thread_local constinit int call_threads = 1;

namespace {

constexpr int kSpins = 5000;  // some tens of microseconds, in which the next copies of a call begin

// Sleeps until a wake-up, unless the word has changed since it was `seen`.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen) {
    ::syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<std::uint32_t>& word, std::size_t threads) {
    ::syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, static_cast<int>(threads), nullptr, nullptr, 0);
}

// While it exists, a thread that this thread starts blocks all signals but those of a fault of its own.
class BlockedSignals {
public:
    BlockedSignals() {
        sigset_t blocked;
        ::sigfillset(&blocked);
        for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) ::sigdelset(&blocked, fault);
        ::pthread_sigmask(SIG_SETMASK, &blocked, &before_);
    }
    ~BlockedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    BlockedSignals(const BlockedSignals&) = delete;

private:
    sigset_t before_;
};

}  // namespace

ThreadTeam& ThreadTeam::instance() {
    [[maybe_unused]] static const int is_watching_forks =
        ::pthread_atfork(nullptr, nullptr, [] { call_threads = 1; });  // the helpers of the call are not in the child
    return of_this_process<ThreadTeam>();
}

bool ThreadTeam::open() {
    if (is_open_.exchange(true, std::memory_order_acquire)) return false;
    caller_.store(static_cast<int>(::syscall(SYS_gettid)), std::memory_order_relaxed);
    return true;
}

void ThreadTeam::run(std::size_t shares, const Work& work) {
    // 1. Announce the shares, and wake helpers if too few are awake.
    start_helpers(shares - 1);
    caller_core_.store(::sched_getcpu(), std::memory_order_relaxed);
    work_ = &work;
    shares_ = shares;
    unfinished_.store(static_cast<std::uint32_t>(shares), std::memory_order_relaxed);
    unclaimed_.store(static_cast<std::uint32_t>(shares), std::memory_order_release);
    runs_.fetch_add(1);
    const std::size_t awake = helpers_ - sleepers_.load();
    if (awake < shares - 1) futex_wake(runs_, shares - 1 - awake);
    // 2. Do the shares that no helper has begun. They use one thread if they have shares of their own.
    const int threads = std::exchange(call_threads, 1);
    while (do_share()) {
    }
    call_threads = threads;
    // 3. Wait for the others.
    for (std::uint32_t left; (left = unfinished_.load(std::memory_order_acquire)) != 0;) {
        if (!spin(unfinished_, left)) futex_wait(unfinished_, left);
    }
    if (const std::exception_ptr error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
}

// The helpers run until the process ends, by which time no call may run: they then sleep.
void ThreadTeam::start_helpers(std::size_t count) {
    if (helpers_ >= count || !can_start_) return;
    const BlockedSignals blocked;
    const auto body = [](void* team) -> void* {
        static_cast<ThreadTeam*>(team)->help();
        return nullptr;
    };
    for (pthread_t helper; helpers_ < count; ++helpers_) {
        if (::pthread_create(&helper, nullptr, body, this) != 0) {
            can_start_ = false;
            return;
        }
        ::pthread_setname_np(helper, "dist_prims_copy");
        ::pthread_detach(helper);
    }
}

void ThreadTeam::help() {
    for (;;) {
        const std::uint32_t seen = runs_.load();
        leave_core_of_caller();
        while (do_share()) {
        }
        if (spin(runs_, seen)) continue;
        sleepers_.fetch_add(1);
        futex_wait(runs_, seen);
        sleepers_.fetch_sub(1);
    }
}

// A helper that wakes up on the core of the caller would stop it: the scheduler prefers the thread that wakes up, and
// does so again and again where no other core shares a cache with this one. The helper moves to any other core of the
// caller.
void ThreadTeam::leave_core_of_caller() const {
    const int core = caller_core_.load(std::memory_order_relaxed);
    cpu_set_t cores;
    if (::sched_getcpu() != core) return;
    if (::sched_getaffinity(caller_.load(std::memory_order_relaxed), sizeof cores, &cores) != 0) return;
    CPU_CLR(static_cast<std::size_t>(core), &cores);
    ::sched_setaffinity(0, sizeof cores, &cores);  // fails without another core
}

// Spins while the team is open, for a limited time; returns whether the word is not `seen` any more.
bool ThreadTeam::spin(const std::atomic<std::uint32_t>& word, std::uint32_t seen) const {
    for (int spins = 0; spins < kSpins && is_open_.load(std::memory_order_relaxed); ++spins) {
        if (word.load(std::memory_order_acquire) != seen) return true;
        relax();
    }
    return false;
}

// Claims a share and does it; returns false if there is none.
bool ThreadTeam::do_share() {
    std::uint32_t unclaimed = unclaimed_.load(std::memory_order_relaxed);
    do {
        if (unclaimed == 0) return false;
    } while (!unclaimed_.compare_exchange_weak(unclaimed, unclaimed - 1, std::memory_order_acquire,
                                               std::memory_order_relaxed));
    const std::exception_ptr error = caught([&] { (*work_)(Share{unclaimed - 1, shares_}); });
    end_past_cache();  // a fence of this thread orders its own stores only
    if (error) {
        const std::lock_guard lock(error_guard_);
        if (!error_) error_ = error;
    }
    if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) futex_wake(unfinished_, 1);
    return true;
}

CallThreads::CallThreads(int threads) : has_team_(threads > 1 && ThreadTeam::instance().open()) {
    if (has_team_) call_threads = threads;
}

CallThreads::~CallThreads() {
    if (!has_team_ || std::exchange(call_threads, 1) == 1) return;  // 1: in a forked child, whose team is another one
    ThreadTeam::instance().close();
}

}  // namespace dist_prims
