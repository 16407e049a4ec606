// How to wait for what can only be asked for, beside others who want the core.
//
// MPI moves data only while someone asks, so who waits asks again at once, then leaves the core to others in between,
// and then sleeps in between, never for more than a small part of the time it has waited: ranks may outnumber cores,
// and the rank that all wait for may be the one that needs this core.
#pragma once

#include <chrono>
#include <functional>

#include "library.h"

namespace dist_prims::mpi {

// How long to sleep before asking again, after so long a time without an event.
std::chrono::microseconds nap_after(Clock::duration quiet);

class Patience {
public:
    // Between two questions. `look` is called now and then.
    void rest(const LookAround& look);

private:
    const Clock::time_point since_ = Clock::now();
    Clock::time_point looked_ = since_;
    int asked_ = 0;
};

}  // namespace dist_prims::mpi
