// How a wait spends its time. It spins while the awaited ranks run on other cores, yields its core if one of them needs
// it, and sleeps if a yield takes long.
//
// Yielding is fastest among ranks. If another process wants the core, the yield returns late, and sleeping is faster:
// the scheduler favours a thread that wakes up over one that computes.
#pragma once

#include "membership.h"

namespace dist_prims {

class WaitPolicy {
public:
    explicit WaitPolicy(Membership& membership) : membership_(&membership) {}

    // One turn of the wait. Returns true when the caller should check for failures.
    template <typename Over>
    bool wait(bool shares_core, const Over& over) {
        if (spin(shares_core) || yield()) return false;
        membership_->sleep(over);
        return true;
    }

private:
    bool spin(bool shares_core);
    bool yield();

    Membership* membership_;
    int spins_ = 0, yields_ = 0;
};

}  // namespace dist_prims
