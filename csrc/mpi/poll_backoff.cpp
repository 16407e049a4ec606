#include "poll_backoff.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <thread>

namespace dist_prims::mpi {
namespace {

using namespace std::chrono_literals;

constexpr int kAskAtOnce = 20;
constexpr auto kYielding = 20ms;
constexpr auto kLongYield = 300us;
constexpr auto kCrowded = 50ms;
constexpr auto kBetweenLooks = 5ms;

// Until when waits sleep rather than yield: a slow yield has given the core to a thread that keeps it, and the
// scheduler favours a thread that wakes up over one that computes.
std::atomic<Clock::rep> crowded_until{0};

// The time afterwards.
Clock::time_point yield(Clock::time_point now) {
    ::sched_yield();
    const auto after = Clock::now();
    if (after - now > kLongYield) crowded_until = (after + kCrowded).time_since_epoch().count();
    return after;
}

}  // namespace

std::chrono::microseconds poll_interval(Clock::duration quiet) {
    const auto part = std::chrono::duration_cast<std::chrono::microseconds>(quiet) / 256;
    return std::clamp<std::chrono::microseconds>(part, 20us, 10ms);
}

void PollBackoff::pause(const WaitHook& look) {
    if (++asked_ <= kAskAtOnce) return;
    auto now = Clock::now();
    if (now - since_ < kYielding && now.time_since_epoch().count() > crowded_until)
        now = yield(now);
    else
        std::this_thread::sleep_for(poll_interval(now - since_));
    if (now - looked_ < kBetweenLooks) return;
    looked_ = now;
    if (look) look();
}

}  // namespace dist_prims::mpi
