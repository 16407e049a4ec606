// One operation of a group, from its start in MPI to its end.
#pragma once

#include <atomic>
#include <memory>

#include "calls.h"
#include "group.h"

namespace dist_prims::mpi {

class Operation : public std::enable_shared_from_this<Operation> {
public:
    // Called once with the result (null: success); returns a callback that runs afterwards. It owns what MPI works on.
    using Done = std::function<std::function<void()>(std::exception_ptr)>;

    // `timeout` counts from now; for a message from when a thread waits for it, because a receive may be posted long
    // before its message comes.
    Operation(std::shared_ptr<Group> group, std::string what, bool is_message, Milliseconds timeout,
              std::size_t largest_count, Done done);

    // Starts the operation by `calls`. If `attended`, the caller waits for it at once.
    void begin(const std::function<void(Calls&)>& calls, bool attended);
    // Whether the operation has ended; makes progress on all of MPI.
    bool test();
    // Returns true when the operation has ended, with or without an error, and false when another thread has called
    // wake(). After the limit (default: the timeout) the group ends, and the operation with it.
    bool wait(Milliseconds limit, const WaitHook& look);
    void wake() { woken_ = true; }
    int source() const { return source_; }  // of a message
    bool is_attended() const { return attended_ > 0; }

private:
    void start(const std::function<void(Calls&)>& calls);
    bool over();
    std::exception_ptr late(Milliseconds limit) const;
    std::exception_ptr named(const std::string& text, bool timeout = false) const;

    enum OperationState { kUnderWay, kEnding, kEnded };

    const std::shared_ptr<Group> group_;
    const std::string what_;
    const bool is_message_;
    const Milliseconds timeout_;
    const Clock::time_point begun_ = Clock::now();
    Calls calls_;
    std::atomic<OperationState> state_{kUnderWay};
    std::atomic<bool> woken_{false};
    std::atomic<int> attended_{0}, source_{-1};
    std::exception_ptr error_;
    Done done_;
};

}  // namespace dist_prims::mpi
