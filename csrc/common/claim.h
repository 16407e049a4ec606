// A receive that is posted in two places, such as one from any rank of several hosts: the first message that takes the
// claim is the one it receives.
#pragma once

#include <atomic>
#include <memory>

namespace dist_prims {

class Claim {
public:
    // Whether the caller has it now. Returns true once.
    bool take() { return !is_taken_.exchange(true); }

private:
    std::atomic<bool> is_taken_{false};
};
using ClaimPtr = std::shared_ptr<Claim>;

// Takes the claim of a receive for a message that meets it. False: a message in another place has it. A receive without
// a claim is posted in one place only.
inline bool take_claim(const ClaimPtr& claim) {
    return !claim || claim->take();
}

}  // namespace dist_prims
