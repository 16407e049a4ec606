#include "python_use.h"

#include <Python.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "../../common/thread.h"
#include "python_signals.h"

namespace dist_prims {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kBetweenLooks{1};

std::atomic<int> uses{0};
std::atomic<bool> has_ended{false};
// A forked child has none of the threads.
[[maybe_unused]] const int is_watching_forks = ::pthread_atfork(nullptr, nullptr, [] {
    uses = 0;
    has_ended = false;
});

}  // namespace

PythonUse::PythonUse() {
    ++uses;  // before the look: end_python_use() sees this use, or this use sees its mark
    is_allowed_ = !has_ended;
    if (!is_allowed_) --uses;
}

PythonUse::~PythonUse() {
    if (is_allowed_) --uses;
}

bool PythonUse::wait_until_decided() const {
    const auto until = Clock::now() + Thread::kTimeToEnd;
    while (!is_allowed_ && Py_IsInitialized() && !is_main_thread() && Clock::now() < until)
        std::this_thread::sleep_for(kBetweenLooks);
    return is_allowed_ || Py_IsInitialized();
}

void end_python_use() {
    has_ended = true;
    const auto until = Clock::now() + Thread::kTimeToEnd;
    while (uses > 0 && Clock::now() < until) {
        std::this_thread::sleep_for(kBetweenLooks);
        run_python_signal_handlers();
    }
}

}  // namespace dist_prims
