// The collectives of a group, one after the other in the order of the calls.
//
// A call on an idle queue runs where it is made: no thread is woken, no context switched. One that must not wait is
// left to the queue's own thread; who waits for it before that thread has come to it runs it himself.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace dist_prims {

class Queue {
public:
    // Work of the queue: `run` does it, `done` tells how it ended (null: well) on the thread that ran it.
    struct Job {
        std::function<void()> run;
        std::function<void(std::exception_ptr)> done;
        bool finished = false;  // under the lock of the queue
    };
    using Handle = std::shared_ptr<Job>;

    ~Queue() { close(nullptr, {}); }

    // Run it here, after all that was submitted before.
    void run(const Handle& job, const std::function<void()>& interrupt);

    // Leave it to the thread of the queue.
    void submit(Handle job);

    // Return when it is finished; false if that takes longer than `until` (empty: for ever).
    bool wait(const Handle& job, std::chrono::milliseconds limit, const std::function<void()>& interrupt);

    // No more work: what has not begun ends with `reason`; what runs may finish for a moment, then `stop` is called to
    // end it; the thread ends.
    void close(std::exception_ptr reason, const std::function<void()>& stop);

private:
    void serve();
    void execute(std::unique_lock<std::mutex>& lock);

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Handle> jobs_;
    bool running_ = false, closed_ = false;
    std::thread thread_;
};

}  // namespace dist_prims
