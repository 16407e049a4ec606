// What threads of this library do with Python at the exit of the process.
//
// When the interpreter shuts down, Python ends each thread that still waits for the GIL by unwinding its stack. If a
// destructor waits, the process aborts. A thread waits for the GIL when it runs a callback of a user, and when it drops
// the last reference to a tensor that Python has known. So the exit of the process waits for the threads that do this,
// and from then on nothing is dropped.
#pragma once

#include <memory>
#include <utility>

namespace dist_prims {

// Exists while a thread may wait for the GIL. False if the process is about to end: then the thread must not wait.
class PythonUse {
public:
    PythonUse();
    ~PythonUse();
    PythonUse(const PythonUse&) = delete;
    explicit operator bool() const { return is_allowed_; }
    // Whether this thread may use Python. If the process is about to end, waits until Python has shut down, and returns
    // false. Returns true if Python has not shut down after 20 s: a function that Python runs at exit may wait for this
    // thread. The main thread does not wait, because Python never ends it.
    bool wait_until_decided() const;

private:
    bool is_allowed_;
};

// Keeps a value that any thread may drop, such as a tensor. It is not destroyed if the process is about to end.
template <typename T>
std::shared_ptr<T> droppable(T value) {
    return {std::make_unique<T>(std::move(value)).release(), [](T* dropped) {
                if (const PythonUse use; use) delete dropped;
            }};
}

// Call this when the process is about to end. From now on no PythonUse is allowed. Waits until those that were allowed
// have been destroyed, for 20 s at most.
void end_python_use();

}  // namespace dist_prims
