// The backoff of a wait that polls MPI.
//
// MPI moves data only while a thread polls it. A wait therefore polls again at once at first, then yields the core in
// between, and then sleeps in between, never for more than a small part of the time it has waited: ranks may outnumber
// cores, and the rank that all wait for may need this core.
#pragma once

#include <chrono>
#include <functional>

#include "mpi_state.h"

namespace dist_prims::mpi {

// The time to sleep before the next poll, after `quiet` time without an event.
std::chrono::microseconds poll_interval(Clock::duration quiet);

class PollBackoff {
public:
    // Pauses between two polls. `wait_hook` is called at intervals.
    void pause(const WaitHook& wait_hook);

private:
    const Clock::time_point since_ = Clock::now();
    Clock::time_point last_hook_ = since_;
    int polls_ = 0;
};

}  // namespace dist_prims::mpi
