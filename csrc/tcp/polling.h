// How a thread that waits for messages polls before it sleeps; shm/wait_policy.h has the same for shared memory. A poll
// is a call of the kernel, and takes less time than to wake up a thread.
//
// A wait yields its core between two polls. A yield that takes long has given the core to another thread. Waits then
// sleep at once for a time, since the scheduler favours a thread that wakes up.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <mutex>

#include "../common/thread.h"

namespace dist_prims {

// Of all waits of a lane, whose lock guards it.
class Polling {
public:
    using Clock = std::chrono::steady_clock;

    // `polls`: whether the ranks have cores enough to poll.
    explicit Polling(bool polls) : polls_(polls) {}

    class Wait {
    public:
        explicit Wait(Polling& polling) : polling_(polling) {}

        // Returns whether to poll again; false: it is time to sleep. The lock is given away meanwhile.
        bool again(std::unique_lock<std::mutex>& lock) {
            constexpr int kPolls = 30, kPollsInBackground = 3;
            if (!polling_.polls_ || polls_++ == (in_background ? kPollsInBackground : kPolls)) return false;
            const auto now = Clock::now();
            if (now < polling_.poll_again_) return false;
            lock.unlock();
            ::sched_yield();
            lock.lock();
            polling_.note_yield(now, Clock::now());
            return true;
        }

    private:
        Polling& polling_;
        int polls_ = 0;
    };

private:
    void note_yield(Clock::time_point began, Clock::time_point ended) {
        using namespace std::chrono_literals;
        constexpr Clock::duration kLong = 200us, kFirstBackoff = 1ms, kLongestBackoff = 64ms;
        const bool is_long = ended - began > kLong;
        backoff_ =
            is_long ? std::clamp<Clock::duration>(2 * backoff_, kFirstBackoff, kLongestBackoff) : Clock::duration{};
        if (is_long) poll_again_ = ended + backoff_;
    }

    const bool polls_;
    Clock::time_point poll_again_{};  // until then waits do not poll before they sleep: other threads need the core
    Clock::duration backoff_{};
};

}  // namespace dist_prims
