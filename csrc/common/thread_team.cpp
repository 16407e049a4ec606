#include "thread_team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#include "process.h"
#include "streaming.h"
#include "thread.h"

namespace dist_prims {

thread_local constinit int call_threads = 1;

namespace {

using Work = std::function<void(const Share&)>;

constexpr int kYields = 100;  // of the caller, before it sleeps until the last helper has ended its share

// Sleeps until a wake-up, unless the word has changed since it was `seen`.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen) {
    ::syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<std::uint32_t>& word, std::size_t threads) {
    ::syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, static_cast<int>(threads), nullptr, nullptr, 0);
}

// The cores of the calling thread, but not the core that it runs on.
cpu_set_t cores_of_helpers() {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    ::sched_getaffinity(0, sizeof cores, &cores);
    if (const int core = ::sched_getcpu(); core >= 0) CPU_CLR(static_cast<std::size_t>(core), &cores);
    return cores;
}

// The team of this process. A forked child has no helpers of its parent, and gets a team of its own.
class ThreadTeam {
public:
    void run(std::size_t shares, const Work& work) {
        if (is_busy_.exchange(true, std::memory_order_acquire)) return work(Share{});
        // 1. Announce the shares, and wake helpers.
        start_helpers(shares - 1);
        work_ = &work;
        shares_ = shares;
        cores_ = cores_of_helpers();
        unfinished_.store(static_cast<std::uint32_t>(shares), std::memory_order_relaxed);
        unclaimed_.store(static_cast<std::uint32_t>(shares), std::memory_order_release);
        runs_.fetch_add(1, std::memory_order_release);
        futex_wake(runs_, shares - 1);
        // 2. Do the shares that no helper has begun.
        while (claim_and_do([] {})) {
        }
        // 3. Wait for the others.
        std::uint32_t left = 0;
        for (int turn = 0; (left = unfinished_.load(std::memory_order_acquire)) != 0; ++turn) {
            if (turn < kYields)
                std::this_thread::yield();
            else
                futex_wait(unfinished_, left);
        }
        const std::exception_ptr error = std::exchange(error_, nullptr);
        is_busy_.store(false, std::memory_order_release);
        if (error) std::rethrow_exception(error);
    }

private:
    // The helpers run until the process ends.
    void start_helpers(std::size_t count) {
        while (helpers_ < count && can_start_) {
            try {
                std::thread helper = start_thread("a helper of a call", [this] { help(); });
                ::pthread_setname_np(helper.native_handle(), "dist_prims_copy");
                helper.detach();
                ++helpers_;
            } catch (const std::system_error&) {
                can_start_ = false;
            }
        }
    }

    // A helper that wakes up on the core of the caller would stop it: the scheduler prefers the thread that wakes up,
    // and does so again and again where no other core shares a cache with this one. So the helper moves to the other
    // cores of the caller. The system refuses an empty set.
    void help() {
        for (;;) {
            const std::uint32_t seen = runs_.load(std::memory_order_acquire);
            while (claim_and_do([this] { ::sched_setaffinity(0, sizeof cores_, &cores_); })) {
            }
            futex_wait(runs_, seen);
        }
    }

    // Claims a share, and calls `begin` and does it; returns false if there is none.
    template <typename Begin>
    bool claim_and_do(const Begin& begin) {
        std::uint32_t unclaimed = unclaimed_.load(std::memory_order_relaxed);
        do {
            if (unclaimed == 0) return false;
        } while (!unclaimed_.compare_exchange_weak(unclaimed, unclaimed - 1, std::memory_order_acquire,
                                                   std::memory_order_relaxed));
        begin();
        const std::exception_ptr error = caught([&] { (*work_)(Share{unclaimed - 1, shares_}); });
        end_past_cache();  // a fence of this thread orders its own stores only
        if (error) {
            const std::lock_guard lock(error_guard_);
            if (!error_) error_ = error;
        }
        if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) futex_wake(unfinished_, 1);
        return true;
    }

    std::atomic<bool> is_busy_{false};
    // Of the thread that has set `is_busy_`:
    std::size_t helpers_ = 0;
    bool can_start_ = true;  // false after the system has refused a thread
    // Memory order: the caller writes the next three, then `unclaimed_` (release). A claim lowers `unclaimed_`
    // (acquire), so the three belong to the claimed share until its thread lowers `unfinished_` (release), and the
    // caller has read 0 there (acquire). A helper that reads the new `runs_` sees the shares that it announces.
    const Work* work_ = nullptr;
    std::size_t shares_ = 0;
    cpu_set_t cores_{};  // of the helpers
    std::atomic<std::uint32_t> unclaimed_{0}, unfinished_{0};
    std::atomic<std::uint32_t> runs_{0};  // on which the helpers sleep
    std::mutex error_guard_;
    std::exception_ptr error_;  // the first of this run
};

}  // namespace

void run_shares(std::size_t shares, const Work& work) {
    of_this_process<ThreadTeam>().run(shares, work);
}

}  // namespace dist_prims
