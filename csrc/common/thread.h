// A thread of a group, and the guard around what it runs.
//
// A thread may run a callback of a user, and that callback may drop the last reference to the group. So the body of a
// thread owns what it uses, by shared pointers; the object that has started the thread only waits for its end. It may
// do so on the thread itself.
#pragma once

#include <cxxabi.h>

#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <thread>

namespace dist_prims {

// Runs `act` and returns what it throws, or null. Python ends a thread that needs the interpreter after its end by
// unwinding the thread's stack: no handler may stop that.
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

// True on threads that work in the background of this process: its other threads need the core more.
inline thread_local bool in_background = false;

class BackgroundScope {
public:
    BackgroundScope() : before_(in_background) { in_background = true; }
    ~BackgroundScope() { in_background = before_; }
    BackgroundScope(const BackgroundScope&) = delete;

private:
    const bool before_;
};

class Thread {
public:
    static constexpr std::chrono::seconds kTimeToEnd{20};

    Thread() = default;
    // No exception leaves `body`.
    explicit Thread(std::function<void()> body);
    Thread(Thread&&) = default;
    Thread& operator=(Thread&&) = default;
    ~Thread() { end(); }

    bool has_begun() const { return thread_.joinable(); }

    // Waits until the body has returned, but not on the thread itself. A body that takes longer than kTimeToEnd is left
    // to itself: it is in a callback of the user, and has all that it uses.
    void end();

private:
    std::thread thread_;
    std::future<void> ended_;
};

}  // namespace dist_prims
