// A line on stderr about a collective that takes long, from a rank whose connections are a reason.
//
// A rank that receives slowly does not know why: the sender may itself wait for a third rank. The sender knows how long
// the network had bytes to deliver for it, and how many of these bytes have been acknowledged. So a rank reports what
// its connections have delivered if one of them had bytes to deliver for at least half of the time of the call.
#pragma once

#include <chrono>
#include <map>
#include <string>

#include "../common/types.h"
#include "../shm/membership.h"
#include "transport.h"

namespace dist_prims {

class SlowCall {
public:
    // For the thread that makes the call.
    void begin(const Call& call, std::chrono::milliseconds timeout);
    // Called at intervals by the waits of the call. Prints the line after a tenth of the timeout, once for a call, and
    // once within the timeout for a process.
    void look(Transport& transport, const Membership& membership);

private:
    using Delivered = std::map<int, Transport::Delivered>;

    std::string text(const Delivered& now, std::chrono::microseconds time, const Membership& membership) const;

    Call call_;
    std::chrono::milliseconds timeout_{0};
    Clock::time_point began_, measured_, next_look_;  // measured_: when before_ was read; zero: not yet
    Delivered before_;
    bool is_over_ = true;  // there is nothing more to report
};

}  // namespace dist_prims
