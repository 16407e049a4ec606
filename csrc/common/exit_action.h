// Actions at the normal exit of the process.
#pragma once

#include <functional>

namespace dist_prims {

// Runs `act` if the process ends by exit() with status 0 while this object exists, after the Python interpreter has
// been finalized. Another status reports a failure, so nothing runs then. Nothing runs in a forked child, and nothing
// at _exit(), by which a worker of multiprocessing ends: see run_exit_actions().
class ExitAction {
public:
    explicit ExitAction(std::function<void()> act);
    ~ExitAction();
    ExitAction(const ExitAction&) = delete;

private:
    const std::function<void()> act_;
    const int owner_;
};

// Runs the actions of this process now. For a process that is about to end by _exit() with status 0.
void run_exit_actions();

}  // namespace dist_prims
