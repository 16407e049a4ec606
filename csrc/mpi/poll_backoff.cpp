#include "poll_backoff.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <thread>

namespace dist_prims::mpi {
namespace {

using namespace std::chrono_literals;

constexpr int kPollsAtOnce = 20;
constexpr auto kYieldFor = 20ms;
constexpr auto kLongYield = 300us;
constexpr auto kCrowdedFor = 50ms;
constexpr auto kBetweenHooks = 5ms;

// Until when waits sleep rather than yield: a slow yield has given the core to a thread that keeps it, and the
// scheduler favours a thread that wakes up over one that computes.
std::atomic<Clock::rep> crowded_until{0};

// Yields the core, and returns the time afterwards.
Clock::time_point yield(Clock::time_point now) {
    ::sched_yield();
    const auto after = Clock::now();
    if (after - now > kLongYield) crowded_until = (after + kCrowdedFor).time_since_epoch().count();
    return after;
}

}  // namespace

std::chrono::microseconds poll_interval(Clock::duration quiet) {
    const auto part = std::chrono::duration_cast<std::chrono::microseconds>(quiet) / 256;
    return std::clamp<std::chrono::microseconds>(part, 20us, 10ms);
}

void PollBackoff::pause(const WaitHook& wait_hook) {
    if (++polls_ <= kPollsAtOnce) return;
    auto now = Clock::now();
    if (now - since_ < kYieldFor && now.time_since_epoch().count() > crowded_until)
        now = yield(now);
    else
        std::this_thread::sleep_for(poll_interval(now - since_));
    if (now - last_hook_ < kBetweenHooks) return;
    last_hook_ = now;
    if (wait_hook) wait_hook();
}

}  // namespace dist_prims::mpi
