// The first bytes of a connection: who opened it, for which kind of messages, and the token of the group, which only
// its ranks know. A connection with another greeting is closed, so a process of another group or job cannot join by
// mistake.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace dist_prims {

struct Greeting {
    static constexpr std::uint64_t kMagic = 0x6470'7463'7000'0001;  // the last digits are the version of the protocol
    static constexpr std::size_t kTokenBytes = 32;

    Greeting() = default;
    // A token that is longer than kTokenBytes is cut, one that is shorter is filled with zeros.
    Greeting(int rank, int lane, const std::string& token);

    // Whether the sender belongs to the group of this token. The time does not depend on where the tokens differ.
    bool is_valid(const std::string& token, int ranks, int lanes) const;

    std::uint64_t magic = 0;
    std::int32_t rank = -1, lane = -1;
    std::array<unsigned char, kTokenBytes> token{};
};

}  // namespace dist_prims
