#include "thread.h"

#include <sys/resource.h>

#include <memory>
#include <system_error>
#include <utility>

namespace dist_prims {

thread_local constinit bool in_background = false;

std::thread start_thread(const std::string& what, std::function<void()> body) {
    try {
        return std::thread([body = std::move(body)]() mutable {
            caught(body);    // an exception ends the body only
            body = nullptr;  // frees what the body holds before the thread ends
        });
    } catch (const std::system_error& error) {
        rlimit limit{};
        ::getrlimit(RLIMIT_NPROC, &limit);
        const std::string number = limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur);
        throw std::system_error(
            error.code(),
            what + " cannot start; raise the limit of processes and threads of this user (`ulimit -u`, now " + number +
                "), the limit of the container (pids.max of its cgroup), or free memory");
    }
}

// The body holds the promise. start_thread() frees the body after it has returned or thrown, which makes the future
// ready.
Thread::Thread(const std::string& what, std::function<void()> body) {
    const auto running = std::make_shared<std::promise<void>>();
    ended_ = running->get_future();
    thread_ = start_thread(what, [running, body = std::move(body)] { body(); });
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
