#include "queue.h"

#include <stdexcept>
#include <utility>

#include "peers.h"

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
            execute(lock, false);
            return;
        }
    }
    wait(job, std::chrono::milliseconds::max(), interrupt);
}

bool Queue::take() {
    const std::lock_guard lock(mutex_);
    if (closed_) throw std::runtime_error("the group has been destroyed");
    if (running_ || !jobs_.empty()) return false;
    return running_ = true;
}

void Queue::give_back() {
    bool awaited = false;
    {
        const std::lock_guard lock(mutex_);
        running_ = false;
        awaited = !jobs_.empty() || closed_;
    }
    if (awaited) changed_.notify_all();
}

void Queue::submit(Handle job) {
    const std::lock_guard lock(mutex_);
    if (closed_) throw std::runtime_error("the group has been destroyed");
    jobs_.push_back(std::move(job));
    have_server();
    changed_.notify_all();
}

void Queue::have_server() {
    if (servers_ > 0 || jobs_.empty() || closed_) return;
    ++servers_;
    threads_.emplace_back([this] { serve(); });
}

// Run the first job; the lock is held before and after, not during. The next may begin while this one is being told.
void Queue::execute(std::unique_lock<std::mutex>& lock, bool serving) {
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
    const auto tell = job->done(error);
    lock.lock();
    running_ = false;
    job->finished = true;
    changed_.notify_all();
    if (!tell) return;
    servers_ -= serving;
    have_server();
    lock.unlock();
    tell();
    lock.lock();
    servers_ += serving;
}

bool Queue::wait(const Handle& job, std::chrono::milliseconds limit, const std::function<void()>& interrupt) {
    const bool for_ever = limit == std::chrono::milliseconds::max();
    const auto deadline = std::chrono::steady_clock::now() + (for_ever ? std::chrono::milliseconds(0) : limit);
    std::unique_lock lock(mutex_);
    while (!job->finished) {
        if (for_ever && !running_ && !jobs_.empty() && jobs_.front() == job) {  // who runs it cannot give up waiting
            execute(lock, false);
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
    in_background = true;
    std::unique_lock lock(mutex_);
    while (!closed_) {
        if (!running_ && !jobs_.empty())
            execute(lock, true);
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
    for (const Handle& job : left) {
        const auto tell = job->done(reason);
        {
            const std::lock_guard lock(mutex_);
            job->finished = true;
        }
        changed_.notify_all();
        if (tell) tell();
    }
    for (std::thread& thread : threads_) {
        if (thread.get_id() == std::this_thread::get_id())
            thread.detach();  // told of its end, someone destroys the group
        else
            thread.join();
    }
    threads_.clear();
}

}  // namespace dist_prims
