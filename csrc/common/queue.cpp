#include "queue.h"

#include <stdexcept>
#include <utility>

namespace dist_prims {
namespace {

constexpr auto kInterruptEvery = std::chrono::milliseconds(50);
constexpr auto kMomentToFinish = std::chrono::milliseconds(500);  // of the running job, when the queue is closed

thread_local const Queue* served = nullptr;  // the queue whose thread this is

// Marks a wait of this thread while it runs signal handlers. Scopes nest: a handler may wait in another group.
struct InterruptionScope {
    InterruptionScope(const Queue* queue, const char* title)
        : queue(queue), title(title), outer(std::exchange(innermost, this)) {}
    ~InterruptionScope() { innermost = outer; }
    InterruptionScope(const InterruptionScope&) = delete;

    const Queue* const queue;
    const char* const title;  // of the job
    const InterruptionScope* const outer;
    static inline thread_local const InterruptionScope* innermost = nullptr;  // of this thread
};

// The title of the job for which this thread waits while it runs the handler that is running now; null if there is
// none.
const char* title_interrupted_in(const Queue* queue) {
    const InterruptionScope* scope = InterruptionScope::innermost;
    while (scope && scope->queue != queue) scope = scope->outer;
    return scope ? scope->title : nullptr;
}

}  // namespace

// Throws if no call can be made on this thread now. Under the lock.
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
    const std::lock_guard lock(mutex_);
    running_ = false;
    if (!jobs_.empty() || closed_) changed_.notify_all();
}

void Queue::submit(const Handle& job) {
    const std::lock_guard lock(mutex_);
    check_may_call(job->title);
    ensure_server();
    jobs_.push_back(job);
    changed_.notify_all();
}

// Starts a thread if all threads are blocked in callbacks. Under the lock.
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
    const bool is_unlimited = limit == std::chrono::milliseconds::max();
    const auto deadline = std::chrono::steady_clock::now() + (is_unlimited ? std::chrono::milliseconds(0) : limit);
    std::unique_lock lock(mutex_);
    while (!job->finished) {
        if (runs_here()) check_may_call(job->title);  // it throws
        // A thread that runs the job cannot time out, so only a wait without a limit runs it.
        if (is_unlimited && !running_ && !jobs_.empty() && jobs_.front() == job) {
            execute(lock, false);
        } else if (!is_unlimited && std::chrono::steady_clock::now() >= deadline) {
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

// A thread of the queue.
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

// The first close(). The lock is held before and after, not during.
void Queue::close_once(std::unique_lock<std::mutex>& lock, std::exception_ptr reason,
                       const std::function<void()>& stop) {
    // 1. Let the running job finish, or stop it. If this thread runs the job, it ends after this call.
    closer_ = std::this_thread::get_id();
    const std::deque<Handle> waiting_jobs = std::exchange(jobs_, {});
    changed_.notify_all();
    const bool inside = runs_here();
    const auto is_idle = [this] { return !running_; };
    if (inside || !changed_.wait_for(lock, kMomentToFinish, is_idle)) {
        lock.unlock();
        if (stop) stop();
        lock.lock();
        if (!inside) changed_.wait_for(lock, Thread::kTimeToEnd, is_idle);
    }
    // 2. Fail the jobs that have not begun, and end the threads.
    std::vector<Thread> threads = std::move(threads_);
    lock.unlock();
    for (const Handle& job : waiting_jobs) {
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
