// Threads that divide one large copy or reduction of a call.
//
// The calling thread works too. The helper threads sleep between two divisions; the first division that needs them
// starts them. A thread claims a share when it begins it, so the calling thread does each share that no helper has
// begun: a helper that wakes up late, or that the system refuses, delays no call.
//
// Each element is computed as by one thread, so the results have the same bits.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>

#include "range.h"

namespace dist_prims {

// One of `count` parts of a copy or reduction.
struct Share {
    std::size_t number = 0, count = 1;

    // The part of a buffer of `bytes` that belongs to this share.
    Range of(std::size_t bytes) const { return share_of(number, count, bytes); }
};

// The bytes that a share copies or reads at least: for less the wake-up of a helper takes longer than it saves.
constexpr std::size_t kLeastShare = 1 << 20;

// How many threads parallel_shares() on this thread may use. CallThreads sets it.
extern thread_local constinit int call_threads;

// Sets the threads of a call that the calling thread makes.
class CallThreads {
public:
    explicit CallThreads(int threads) : before_(std::exchange(call_threads, threads)) {}
    ~CallThreads() { call_threads = before_; }
    CallThreads(const CallThreads&) = delete;

private:
    const int before_;
};

// Does all shares of `work`, and returns when they have ended, or throws what one of them has thrown. While another
// thread of this process divides work, this thread does the whole work as one share.
void run_shares(std::size_t shares, const std::function<void(const Share&)>& work);

// Calls `work(share)` for all shares of work that copies or reads `bytes`, on as many threads as the call has and the
// size deserves.
template <typename Work>
void parallel_shares(std::size_t bytes, const Work& work) {
    if (bytes < 2 * kLeastShare || call_threads == 1) return work(Share{});
    run_shares(std::min(static_cast<std::size_t>(call_threads), bytes / kLeastShare), work);
}

}  // namespace dist_prims
