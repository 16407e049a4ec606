// The errors between ranks.
#pragma once

#include <stdexcept>
#include <string>

namespace dist_prims {

// A failure of communication. After kMismatch the group remains usable; after every other kind it does not.
class CommError : public std::runtime_error {
public:
    enum class Kind { kMismatch, kPeerDied, kPeerLeft, kTimeout, kInterrupted, kLost };
    CommError(Kind kind, const std::string& message) : std::runtime_error(message), kind(kind) {}
    const Kind kind;
};

}  // namespace dist_prims
