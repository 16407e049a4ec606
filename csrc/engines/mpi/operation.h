// One operation of a group, from its beginning in MPI to its end.
#pragma once

#include <atomic>
#include <memory>

#include "calls.h"
#include "group.h"

namespace dist_prims::mpi {

class Operation : public std::enable_shared_from_this<Operation> {
public:
    // Told how it ended, once; returns whom else to tell when that is done. It keeps what MPI works on alive.
    using Done = std::function<std::function<void()>(std::exception_ptr)>;

    // `timeout`: from now on; of a message from when it is waited for, as one may be asked for long before it comes.
    Operation(std::shared_ptr<Group> group, std::string what, bool is_message, Milliseconds timeout,
              std::size_t largest_count, Done done);

    // `calls` begins it. If `attended`, the caller waits for it at once.
    void begin(const std::function<void(Calls&)>& calls, bool attended);
    // Whether it has ended; moves on everything that MPI has under way.
    bool test();
    // Returns when it has ended, however, or false when another thread has called wake(). After the limit (by default
    // the timeout) the group ends, and this with it.
    bool wait(Milliseconds limit, const LookAround& look);
    void wake() { woken_ = true; }
    int source() const { return source_; }  // of a message
    bool is_attended() const { return attended_ > 0; }

private:
    void start(const std::function<void(Calls&)>& calls);
    bool over();
    std::exception_ptr late(Milliseconds limit) const;
    std::exception_ptr named(const std::string& text, bool timeout = false) const;

    enum State { kUnderWay, kEnding, kEnded };

    const std::shared_ptr<Group> group_;
    const std::string what_;
    const bool is_message_;
    const Milliseconds timeout_;
    const Clock::time_point begun_ = Clock::now();
    Calls calls_;
    std::atomic<State> state_{kUnderWay};
    std::atomic<bool> woken_{false};
    std::atomic<int> attended_{0}, source_{-1};
    std::exception_ptr error_;
    Done done_;
};

}  // namespace dist_prims::mpi
