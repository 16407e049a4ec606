#include "wait_policy.h"

#include <sched.h>

#include <algorithm>

#include "../common/thread.h"

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr int kSpins = 5000, kSpinsInBackground = 100;  // some tens of microseconds, and a few
constexpr int kYields = 20;
// A yield that takes longer means that a process which is not a rank has the core: a rank does not keep it so long.
constexpr Clock::duration kLongYield = 500us;
// The time without yields after a long yield. Each further long yield doubles it, and a short one resets it.
constexpr Clock::duration kFirstBackoff = 1ms, kLongestBackoff = 64ms;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

// `in_background` (common/thread.h): whether this thread is one of the backend's, beside the application's threads.
bool WaitPolicy::spin(bool shares_core) {
    if (shares_core || spins_ >= (in_background ? kSpinsInBackground : kSpins)) return false;
    relax();
    ++spins_;
    return true;
}

// Give the core to another thread. Return false, and do not yield, if this wait has yielded often enough, or if a yield
// of a thread of this rank was long a short time ago.
bool WaitPolicy::yield() {
    const auto before = Clock::now().time_since_epoch().count();
    if (in_background || yields_ >= kYields || before < membership_->yield_again_.load(std::memory_order_relaxed))
        return false;
    ++yields_;
    ::sched_yield();
    const auto after = Clock::now().time_since_epoch().count();
    Clock::rep backoff = kFirstBackoff.count();
    if (after - before > kLongYield.count()) {
        backoff = std::max(membership_->backoff_.load(std::memory_order_relaxed), kFirstBackoff.count());
        membership_->yield_again_.store(after + backoff, std::memory_order_relaxed);
        backoff = std::min(2 * backoff, kLongestBackoff.count());
    }
    membership_->backoff_.store(backoff, std::memory_order_relaxed);
    return true;
}

}  // namespace dist_prims
