// The collectives of a group, one after the other in the order of the calls.
//
// A call on an idle queue runs where it is made: no thread is woken, no context switched. One that must not wait is
// left to a thread of the queue; who waits for it before that thread has come to it runs it himself. One thread is
// enough unless it is held up in what a user has hung on the end of a collective (a callback may wait for another
// collective): then the queue takes one more.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace dist_prims {

class Queue {
public:
    // Work of the queue: `run` does it, `done` notes how it ended (null: well) and returns whom to tell, who may take
    // his time; all on one thread.
    struct Job {
        std::function<void()> run;
        std::function<std::function<void()>(std::exception_ptr)> done;
        bool finished = false;  // under the lock of the queue
    };
    using Handle = std::shared_ptr<Job>;

    ~Queue() { close(nullptr, {}); }

    // Run it here, after all that was submitted before.
    void run(const Handle& job, const std::function<void()>& interrupt);

    // Take the queue for something that runs here and now; false if there is other work, which must come first.
    bool take();
    void give_back();

    // Leave it to a thread of the queue.
    void submit(Handle job);

    // Return when it is finished; false if that takes longer than `limit`. Who waits for ever may run it himself.
    bool wait(const Handle& job, std::chrono::milliseconds limit, const std::function<void()>& interrupt);

    // No more work: what has not begun ends with `reason`; what runs may finish for a moment, then `stop` is called to
    // end it; the threads end.
    void close(std::exception_ptr reason, const std::function<void()>& stop);

private:
    void serve();
    void have_server();
    void execute(std::unique_lock<std::mutex>& lock, bool serving);

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Handle> jobs_;
    bool running_ = false, closed_ = false;
    std::vector<std::thread> threads_;
    int servers_ = 0;  // of these, the ones that are not held up
};

}  // namespace dist_prims
