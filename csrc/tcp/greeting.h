// The first bytes of a connection: which rank opened it, for which kind of messages, and a code that only a rank of the
// group can make. A connection with another greeting is closed, so a process of another group or job cannot join.
//
// The code is bound to the two ranks and the lane, so a greeting that another process has read from the network is of
// no use at another rank.
#pragma once

#include <cstdint>
#include <string>

#include "../common/authentication.h"

namespace dist_prims {

struct Greeting {
    static constexpr std::uint64_t kMagic = 0x6470'7463'7000'0003;  // the last digits are the version of the protocol

    Greeting() = default;
    // `key`: the key of the group, of any length.
    Greeting(int rank, int to, int lane, const std::string& key);

    // Whether the sender knows the key and means this rank.
    bool is_valid(int to, const std::string& key, int ranks, int lanes) const;

    std::uint64_t magic = 0;
    std::int32_t rank = -1, lane = -1;
    Digest code{};
};

}  // namespace dist_prims
