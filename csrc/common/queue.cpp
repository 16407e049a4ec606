#include "queue.h"

#include <stdexcept>
#include <utility>

namespace dist_prims {
namespace {

constexpr auto kInterruptEvery = std::chrono::milliseconds(50);
constexpr auto kMomentToFinish = std::chrono::milliseconds(500);

thread_local const Queue* served = nullptr;  // the queue whose thread this is

// A wait that runs signal handlers at this moment. Waits of one thread nest: a handler may wait in another group.
struct Interruption {
    const Queue* queue;
    const char* title;
    const Interruption* outer;
};
thread_local const Interruption* innermost = nullptr;

class InterruptionScope {
public:
    InterruptionScope(const Queue* queue, const char* title) : here_{queue, title, innermost} { innermost = &here_; }
    ~InterruptionScope() { innermost = here_.outer; }
    InterruptionScope(const InterruptionScope&) = delete;

private:
    const Interruption here_;
};

const char* title_interrupted_in(const Queue* queue) {
    for (const Interruption* each = innermost; each; each = each->outer)
        if (each->queue == queue) return each->title;
    return nullptr;
}

}  // namespace

// Under the lock.
void Queue::check_may_call(const char* title) const {
    if (closed_) throw std::runtime_error(owner_ + ", " + title + ": the group has been destroyed");
    const char* outer = runs_here() ? running_title_ : title_interrupted_in(this);
    if (outer)
        throw std::runtime_error(owner_ + ", " + title + ": a signal handler or a finalizer makes this call inside " +
                                 outer + " of the same group on the same thread, so it may never begin; " +
                                 "set a flag there, and make the call after " + outer + " has returned");
}

// Under the lock.
void Queue::mark_running(const char* title) {
    running_ = true;
    running_title_ = title;
    runner_ = std::this_thread::get_id();
}

void Queue::run(const Handle& job, const std::function<void()>& interrupt) {
    {
        std::unique_lock lock(mutex_);
        check_may_call(job->title);
        jobs_.push_back(job);
        if (!running_ && jobs_.size() == 1) {
            execute(lock, false);
            return;
        }
    }
    wait(job, std::chrono::milliseconds::max(), interrupt);
}

bool Queue::take(const char* title, bool wanted) {
    const std::lock_guard lock(mutex_);
    check_may_call(title);
    if (!wanted || running_ || !jobs_.empty()) return false;
    mark_running(title);
    return true;
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

void Queue::submit(const Handle& job) {
    const std::lock_guard lock(mutex_);
    check_may_call(job->title);
    ensure_server();
    jobs_.push_back(job);
    changed_.notify_all();
}

// Under the lock.
void Queue::ensure_server() {
    if (servers_ > 0 || closed_) return;
    threads_.emplace_back(owner_ + ": the thread of its queue", [self = shared_from_this()] { self->serve(); });
    ++servers_;
}

// Ends a job, without the lock. Destroys what the job owns: it may own the last reference to the group.
std::function<void()> Queue::end_job(Job& job, std::exception_ptr error) {
    std::function<void()> callback;
    caught([&] { callback = job.done(error); });
    job.run = nullptr;
    job.done = nullptr;
    return callback;
}

// Runs the first job; the lock is held before and after, not during. The next job may begin while this one's callback
// runs.
void Queue::execute(std::unique_lock<std::mutex>& lock, bool serving) {
    const Handle job = std::move(jobs_.front());
    jobs_.pop_front();
    mark_running(job->title);
    lock.unlock();
    const std::exception_ptr error = caught(job->run);
    std::function<void()> callback = end_job(*job, error);
    lock.lock();
    running_ = false;
    job->finished = true;
    changed_.notify_all();
    if (!callback) return;
    servers_ -= serving;
    if (!jobs_.empty()) caught([this] { ensure_server(); });  // without a thread, a wait for the job runs it
    lock.unlock();
    caught(callback);
    callback = nullptr;
    lock.lock();
    servers_ += serving;
}

bool Queue::wait(const Handle& job, std::chrono::milliseconds limit, const std::function<void()>& interrupt) {
    const bool for_ever = limit == std::chrono::milliseconds::max();
    const auto deadline = std::chrono::steady_clock::now() + (for_ever ? std::chrono::milliseconds(0) : limit);
    std::unique_lock lock(mutex_);
    while (!job->finished) {
        if (runs_here()) check_may_call(job->title);                            // it throws
        if (for_ever && !running_ && !jobs_.empty() && jobs_.front() == job) {  // a thread that runs it cannot time out
            execute(lock, false);
        } else if (!for_ever && std::chrono::steady_clock::now() >= deadline) {
            return false;
        } else {
            changed_.wait_for(lock, kInterruptEvery);
            if (interrupt) {
                lock.unlock();
                {
                    const InterruptionScope scope(this, job->title);
                    interrupt();
                }
                lock.lock();
            }
        }
    }
    return true;
}

void Queue::serve() {
    in_background = true;
    served = this;
    std::unique_lock lock(mutex_);
    while (!closed_) {
        if (!running_ && !jobs_.empty())
            execute(lock, true);
        else
            wait_for_notification(changed_, lock);
    }
}

bool Queue::close(std::exception_ptr reason, const std::function<void()>& stop) {
    std::unique_lock lock(mutex_);
    const bool inside = runs_here();
    if (!std::exchange(closed_, true)) {
        close_once(lock, std::move(reason), stop);
    } else if (inside) {
        lock.unlock();
        if (stop) stop();
    } else if (served != this && closer_ != std::this_thread::get_id()) {  // the first call may wait for this thread
        changed_.wait_for(lock, Thread::kTimeToEnd, [this] { return ended_ && !running_; });
    }
    return !inside;
}

// The lock is held before and after, not during.
void Queue::close_once(std::unique_lock<std::mutex>& lock, std::exception_ptr reason,
                       const std::function<void()>& stop) {
    closer_ = std::this_thread::get_id();
    const std::deque<Handle> left = std::exchange(jobs_, {});
    changed_.notify_all();
    const bool inside = runs_here();
    const auto is_idle = [this] { return !running_; };
    if (inside || !changed_.wait_for(lock, kMomentToFinish, is_idle)) {
        lock.unlock();
        if (stop) stop();
        lock.lock();
        if (!inside) changed_.wait_for(lock, Thread::kTimeToEnd, is_idle);
    }
    std::vector<Thread> threads = std::move(threads_);
    lock.unlock();
    for (const Handle& job : left) {
        const auto callback = end_job(*job, reason);
        lock.lock();
        job->finished = true;
        changed_.notify_all();
        lock.unlock();
        if (callback) caught(callback);
    }
    for (Thread& thread : threads) thread.end();
    lock.lock();
    ended_ = true;
    closer_ = {};
    changed_.notify_all();
}

}  // namespace dist_prims
