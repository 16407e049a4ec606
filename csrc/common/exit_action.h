// What this process does at its normal end.
#pragma once

#include <functional>

namespace dist_prims {

// Runs `act` if the process ends by exit() with status 0 while this object exists; the last code of Python has run by
// then. Another status is that of a failure, so nothing is run then, and nothing in a forked child.
class ExitAction {
public:
    explicit ExitAction(std::function<void()> act);
    ~ExitAction();
    ExitAction(const ExitAction&) = delete;

private:
    const std::function<void()> act_;
    const int owner_;
};

}  // namespace dist_prims
