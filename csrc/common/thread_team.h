// Threads that divide the copies and reductions of a large call.
//
// The calling thread works too. The helper threads sleep between calls; the first call that needs them starts them. A
// thread claims a share when it begins it, so the calling thread does each share that no helper has begun: a helper
// that wakes up late, or that the system refuses, delays no call.
//
// Each element is computed as by one thread, so the results have the same bits.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>

#include "range.h"

namespace dist_prims {

// One of `count` parts of a call.
struct Share {
    std::size_t number = 0, count = 1;

    // The part of a buffer of `bytes` that belongs to this share.
    Range of(std::size_t bytes) const { return share_of(number, count, bytes); }
};

class ThreadTeam {
public:
    using Work = std::function<void(const Share&)>;

    // The bytes that a share copies or reads at least: for less the helpers cost more time than they save.
    static constexpr std::size_t kLeastShare = 128 * 1024;

    // The team of this process. A forked child has no helpers of its parent, and gets a team of its own.
    static ThreadTeam& instance();

    // Does all shares of `work`, and returns when they have ended, or throws what one of them has thrown. Only the
    // thread that has opened the team may call it, and not in a share.
    void run(std::size_t shares, const Work& work);

private:
    friend class CallThreads;
    bool open();
    void close() { is_open_.store(false, std::memory_order_release); }
    void start_helpers(std::size_t count);
    void help();
    bool do_share();
    void leave_core_of_caller() const;
    bool spin(const std::atomic<std::uint32_t>& word, std::uint32_t seen) const;

    std::atomic<bool> is_open_{false};
    // Of the thread that has opened the team:
    std::size_t helpers_ = 0;
    bool can_start_ = true;  // false after the system has refused a thread
    // Memory order: the caller writes `work_` and `shares_`, then `unclaimed_` (release). A claim lowers `unclaimed_`
    // (acquire), so the two belong to the claimed share until its thread lowers `unfinished_` (release), and the caller
    // has read 0 there (acquire). A helper that reads the new `runs_` sees the shares that it announces.
    const Work* work_ = nullptr;
    std::size_t shares_ = 0;
    std::atomic<std::uint32_t> unclaimed_{0}, unfinished_{0};
    std::atomic<std::uint32_t> runs_{0};  // on which the helpers sleep
    std::atomic<std::size_t> sleepers_{0};
    std::atomic<int> caller_{0}, caller_core_{-1};  // its thread in the kernel, and the core that it runs on
    std::mutex error_guard_;
    std::exception_ptr error_;  // the first of this run
};

// How many threads parallel_shares() on this thread may use. CallThreads sets it.
extern thread_local constinit int call_threads;

// The threads of a large call, which the calling thread makes. Between its copies and reductions the helpers spin for a
// short time, and sleep then; they sleep when the object is destroyed. While another thread of this process has such an
// object, this one has no effect, and the call uses one thread.
class CallThreads {
public:
    explicit CallThreads(int threads);
    ~CallThreads();
    CallThreads(const CallThreads&) = delete;

private:
    const bool has_team_;
};

// Calls `work(share)` for all shares of work that copies or reads `bytes`, on as many threads as the call has and the
// size deserves.
template <typename Work>
void parallel_shares(std::size_t bytes, const Work& work) {
    if (bytes < 2 * ThreadTeam::kLeastShare || call_threads == 1) return work(Share{});
    const std::size_t shares = std::min(static_cast<std::size_t>(call_threads), bytes / ThreadTeam::kLeastShare);
    ThreadTeam::instance().run(shares, work);
}

}  // namespace dist_prims
