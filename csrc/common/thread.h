// A thread of a group, and the guard around what it runs.
//
// A thread may run a callback of a user, and that callback may drop the last reference to the group. So the body of a
// thread owns what it uses, by shared pointers, and the object that started the thread only waits for it to finish. If
// that object is destroyed on the thread itself, it does not wait: it detaches the thread.
#pragma once

#include <cxxabi.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <future>
#include <string>
#include <thread>

namespace dist_prims {

// Runs `act` and returns what it throws, or null. Once the interpreter has shut down, Python ends any thread that still
// asks for it by unwinding the thread's stack. Nothing may catch that unwinding.
template <typename Act>
std::exception_ptr caught(const Act& act) {
    try {
        act();
        return nullptr;
    } catch (const abi::__forced_unwind&) {
        throw;
    } catch (...) {
        return std::current_exception();
    }
}

// True on background threads. Their waits sleep early, because other threads of this process need the core more.
extern thread_local constinit bool in_background;

class BackgroundScope {
public:
    BackgroundScope() : before_(in_background) { in_background = true; }
    ~BackgroundScope() { in_background = before_; }
    BackgroundScope(const BackgroundScope&) = delete;

private:
    const bool before_;
};

// Waits for a notification; may return without one, as condition_variable::wait() may. To call wait() itself would need
// a symbol that libstdc++ has since GCC 12: a library that needs the symbol cannot be loaded with an older libstdc++.
template <typename Lock>
void wait_for_notification(std::condition_variable& condition, Lock& lock) {
    condition.wait_for(lock, std::chrono::hours(1));
}

// Starts a thread; an exception of `body` is dropped. `what` names it in the error if the system has no thread left:
// the rank and what the thread is for, "rank 1: the thread of the transport over TCP".
std::thread start_thread(const std::string& what, std::function<void()> body);

class Thread {
public:
    static constexpr std::chrono::seconds kTimeToEnd{20};

    Thread() = default;
    // As start_thread().
    Thread(const std::string& what, std::function<void()> body);
    Thread(Thread&&) = default;
    Thread& operator=(Thread&&) = default;
    ~Thread() { end(); }

    bool has_begun() const { return thread_.joinable(); }

    // Waits until the body has returned; on the thread itself it detaches instead. After kTimeToEnd the thread is
    // detached as well: its body must be in a callback of a user, and it owns all that it uses.
    void end();

private:
    std::thread thread_;
    std::future<void> ended_;
};

}  // namespace dist_prims
