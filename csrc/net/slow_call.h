// A line on stderr about a collective that takes long, from a rank one of whose connections is a cause. RemotePeers
// calls SlowCall, in the thread that makes the call.
//
// A rank that receives slowly does not know why: the sender may itself wait for a third rank. The sender knows how long
// its kernel had bytes to deliver on a connection, and how many of these bytes have been acknowledged. So a rank
// reports what its connections have delivered if one of them had bytes to deliver for at least half of the time of the
// call.
//
// The line is left out if descriptor 2 has changed since the group was made: it may be any file of the program.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "../common/types.h"
#include "../shm/membership.h"
#include "transport.h"

namespace dist_prims {

class SlowCall {
public:
    SlowCall();
    // A call begins.
    void begin(const Call& call, std::chrono::milliseconds timeout);
    // Called at the end of each wait of the call, and at intervals in a long one. Prints the line after a tenth of the
    // timeout, once for a call, and once within the timeout for a process.
    void look(Transport& transport, const Membership& membership);
    const Call& call() const { return call_; }

private:
    using Delivered = std::map<int, Transport::Delivered>;

    std::string rates(const Delivered& now, std::chrono::microseconds time, const Membership& membership) const;

    const std::optional<std::pair<std::uint64_t, std::uint64_t>> stderr_at_start_;  // which file; none: closed
    Call call_;
    std::chrono::milliseconds timeout_{0};
    Clock::time_point began_, next_look_;  // look() does nothing before next_look_
    std::optional<Delivered> before_;      // what had been delivered at the first look
    bool is_over_ = true;                  // there is nothing more to report
};

}  // namespace dist_prims
