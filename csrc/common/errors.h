// The errors between ranks.
#pragma once

#include <stdexcept>
#include <string>

namespace dist_prims {

// A failure of communication. After kMismatch the group remains usable; after every other kind it does not.
class CommError : public std::runtime_error {
public:
    enum class Kind {
        kMismatch,
        kPeerDied,
        kPeerLeft,
        kTimeout,
        kInterrupted,
        kLost,
        kUnreachable,
        kExhausted,
        kSilent
    };
    CommError(Kind kind, const std::string& message, bool is_repeated = false)
        : std::runtime_error(message), kind(kind), is_repeated(is_repeated) {}
    const Kind kind;
    const bool is_repeated;  // an earlier error has ended the group; its message has the cause
};

}  // namespace dist_prims
