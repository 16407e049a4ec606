#include "queue.h"

#include <stdexcept>
#include <utility>

namespace dist_prims {
namespace {

constexpr auto kInterruptEvery = std::chrono::milliseconds(50);
constexpr auto kMomentToFinish = std::chrono::milliseconds(500);

}  // namespace

void Queue::run(const Handle& job, const std::function<void()>& interrupt) {
    {
        std::unique_lock lock(mutex_);
        if (closed_) throw std::runtime_error("the group has been destroyed");
        jobs_.push_back(job);
        if (!running_ && jobs_.size() == 1) {
            execute(lock);
            return;
        }
    }
    wait(job, std::chrono::milliseconds::max(), interrupt);
}

void Queue::submit(Handle job) {
    const std::lock_guard lock(mutex_);
    if (closed_) throw std::runtime_error("the group has been destroyed");
    jobs_.push_back(std::move(job));
    if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
    changed_.notify_all();
}

// Run the first job; the lock is held before and after, not during.
void Queue::execute(std::unique_lock<std::mutex>& lock) {
    const Handle job = std::move(jobs_.front());
    jobs_.pop_front();
    running_ = true;
    lock.unlock();
    std::exception_ptr error;
    try {
        job->run();
    } catch (...) {
        error = std::current_exception();
    }
    job->done(error);
    lock.lock();
    running_ = false;
    job->finished = true;
    changed_.notify_all();
}

bool Queue::wait(const Handle& job, std::chrono::milliseconds limit, const std::function<void()>& interrupt) {
    const bool for_ever = limit == std::chrono::milliseconds::max();
    const auto deadline = std::chrono::steady_clock::now() + (for_ever ? std::chrono::milliseconds(0) : limit);
    std::unique_lock lock(mutex_);
    while (!job->finished) {
        if (!running_ && !jobs_.empty() && jobs_.front() == job) {
            execute(lock);
        } else if (!for_ever && std::chrono::steady_clock::now() >= deadline) {
            return false;
        } else {
            changed_.wait_for(lock, kInterruptEvery);
            if (interrupt) {
                lock.unlock();
                interrupt();
                lock.lock();
            }
        }
    }
    return true;
}

void Queue::serve() {
    std::unique_lock lock(mutex_);
    while (!closed_) {
        if (!running_ && !jobs_.empty())
            execute(lock);
        else
            changed_.wait(lock);
    }
}

void Queue::close(std::exception_ptr reason, const std::function<void()>& stop) {
    std::deque<Handle> left;
    {
        std::unique_lock lock(mutex_);
        closed_ = true;
        left.swap(jobs_);
        changed_.notify_all();
        const auto idle = [this] { return !running_; };
        if (!changed_.wait_for(lock, kMomentToFinish, idle)) {
            if (stop) stop();
            changed_.wait(lock, idle);
        }
    }
    for (const Handle& job : left) job->done(reason);
    {
        const std::lock_guard lock(mutex_);
        for (const Handle& job : left) job->finished = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
}

}  // namespace dist_prims
