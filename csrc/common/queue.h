// The collectives of a group, one after the other in the order of the calls.
//
// A call on an idle queue runs on the calling thread: no thread wakes up, no context is switched. A call that must not
// block runs on a thread of the queue, or on a thread that waits for it before the queue's thread has begun it. One
// thread suffices unless it blocks in a callback on the end of a collective (a callback may wait for another
// collective): then the queue adds a thread.
//
// A wait for a collective runs signal handlers, and a handler may use the group. A collective that a handler makes
// could begin only after the one that waits for the handler, so the queue refuses it: also in a wait for a collective
// that a thread of the queue runs, because which thread runs it is left to chance. A handler may end the group.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "thread.h"

namespace dist_prims {

// Must be made by make_shared: its threads share ownership. They live until close().
class Queue : public std::enable_shared_from_this<Queue> {
public:
    // A job: `run` does the work; `done` records the result (null: success) and returns a callback, which may block.
    // All three run on one thread.
    struct Job {
        std::function<void()> run;
        std::function<std::function<void()>(std::exception_ptr)> done;
        const char* title = "a collective";
        bool finished = false;  // under the lock of the queue
    };
    using Handle = std::shared_ptr<Job>;

    // `owner` is the name of the rank in errors.
    explicit Queue(std::string owner = "this rank") : owner_(std::move(owner)) {}

    // Runs the job, after all jobs submitted before: on this thread, or on a thread of the queue while this thread
    // waits. `interrupt` runs signal handlers; a wait calls it every 50 ms.
    void run(const Handle& job, const std::function<void()>& interrupt);

    // Throws if no call can be made on this thread now. If `wanted`, takes the queue for a call that runs on this
    // thread without a Job, until give_back(); returns false if there are jobs, which must run first.
    bool take(const char* title, bool wanted = true);
    void give_back();

    // Adds a job for a thread of the queue; does not block.
    void submit(const Handle& job);

    // Returns true when the job is finished, and false after `limit`. A wait without a limit may run the job itself.
    bool wait(const Handle& job, std::chrono::milliseconds limit, const std::function<void()>& interrupt);

    // Ends the queue, from any thread and any number of times: the first call ends it, and the others wait for the
    // first call. Jobs that have not begun fail with `reason`. The running job has 0.5 s to finish, then `stop` is
    // called to end it. The threads end. Returns false, without waiting for the running job, if that job itself makes
    // the call.
    bool close(std::exception_ptr reason, const std::function<void()>& stop);

private:
    bool runs_here() const { return running_ && runner_ == std::this_thread::get_id(); }
    void mark_running(const char* title);
    void check_may_call(const char* title) const;
    void serve();
    void ensure_server();
    void execute(std::unique_lock<std::mutex>& lock, bool serving);
    static std::function<void()> end_job(Job& job, std::exception_ptr error);
    void close_once(std::unique_lock<std::mutex>& lock, std::exception_ptr reason, const std::function<void()>& stop);

    const std::string owner_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Handle> jobs_;
    bool running_ = false, closed_ = false, ended_ = false;
    const char* running_title_ = "";  // of the running job, if running_
    std::thread::id runner_;          // the thread that runs it
    std::thread::id closer_;          // the thread in close_once()
    std::vector<Thread> threads_;
    int servers_ = 0;  // the threads that are not blocked in a callback
};

}  // namespace dist_prims
