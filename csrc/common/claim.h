// The claim of a receive that is posted in two places: a receive from any rank, in shared memory and at the transport
// between hosts. The first message that takes the claim is the message that the receive gets.
#pragma once

#include <atomic>
#include <memory>

namespace dist_prims {

class Claim {
public:
    // Returns true for the first caller only.
    bool take() { return !is_taken_.exchange(true); }

private:
    std::atomic<bool> is_taken_{false};
};
using ClaimPtr = std::shared_ptr<Claim>;

// Takes the claim of a receive for a message that matches it. False: a message in the other place has it. `claim` is
// null if the receive is posted in one place only.
inline bool take_claim(const ClaimPtr& claim) {
    return !claim || claim->take();
}

}  // namespace dist_prims
