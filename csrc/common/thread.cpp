#include "thread.h"

#include <utility>

namespace dist_prims {

thread_local constinit bool in_background = false;

// The thread's copy of the promise goes when the body has ended, however that came about, and then the future is ready.
Thread::Thread(std::function<void()> body) {
    std::promise<void> running;
    ended_ = running.get_future();
    thread_ = std::thread([body = std::move(body), running = std::move(running)]() mutable {
        caught(body);
        body = nullptr;
    });
}

void Thread::end() {
    if (!thread_.joinable()) return;
    const bool is_this = thread_.get_id() == std::this_thread::get_id();
    if (!is_this && ended_.wait_for(kTimeToEnd) == std::future_status::ready)
        thread_.join();
    else
        thread_.detach();
}

}  // namespace dist_prims
