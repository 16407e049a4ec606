// The order of counters of 64 bits that ranks compare. The comparison is right across the wrap from 2^64 - 1 to 0, as
// long as the two are less than 2^63 apart: no rank of a group is.
#pragma once

#include <cstdint>

namespace dist_prims {

// Whether `one` comes before `other`.
inline bool precedes(std::uint64_t one, std::uint64_t other) {
    return static_cast<std::int64_t>(one - other) < 0;
}

}  // namespace dist_prims
