// How a thread that waits for messages of a lane polls before it sleeps; shm/wait_policy.h has the same for shared
// memory. A poll is a system call, and takes less time than the wake-up of a thread.
//
// A wait yields its core between two polls, not before the first. A yield that takes long has given the core to another
// thread. For a time waits then sleep without polling, since the scheduler favours a thread that wakes up.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <mutex>

#include "../common/thread.h"

namespace dist_prims {

// The state for all waits of a lane, whose lock guards it.
class Polling {
public:
    using Clock = std::chrono::steady_clock;

    // `polls`: whether the ranks have cores enough to poll.
    explicit Polling(bool polls) : polls_(polls) {}

    class Wait {
    public:
        explicit Wait(Polling& polling) : polling_(polling) {}

        // Returns whether to poll; if not, the wait sleeps. Yields the core without the lock before every poll but the
        // first.
        bool again(std::unique_lock<std::mutex>& lock) {
            constexpr int kPolls = 30, kPollsInBackground = 3;
            if (!polling_.polls_ || count_++ == (in_background ? kPollsInBackground : kPolls)) return false;
            const auto now = Clock::now();
            if (now < polling_.poll_again_) return false;
            if (count_ == 1) return true;  // the first poll: the message may have come already
            lock.unlock();
            ::sched_yield();
            lock.lock();
            polling_.note_yield(now, Clock::now());
            return true;
        }

    private:
        Polling& polling_;
        int count_ = 0;  // of the polls of this wait
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
    Clock::time_point poll_again_{};  // waits do not poll before this time, because other threads need the core
    Clock::duration backoff_{};       // from the last long yield to poll_again_
};

}  // namespace dist_prims
