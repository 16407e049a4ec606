// Ranges of bytes, and the equal shares of data.
#pragma once

#include <algorithm>
#include <cstddef>

#include "shared_memory.h"

namespace dist_prims {

struct Range {
    std::size_t begin = 0, end = 0;

    bool empty() const { return begin >= end; }
    std::size_t size() const { return end - begin; }
    Range within(Range other) const { return {std::max(begin, other.begin), std::min(end, other.end)}; }
};

// One of `shares` contiguous parts of `bytes`. Shares end at cache lines.
inline Range share_of(std::size_t number, std::size_t shares, std::size_t bytes) {
    const std::size_t lines = (bytes + kCacheLine - 1) / kCacheLine;
    const auto edge = [&](std::size_t number) { return std::min(number * lines / shares * kCacheLine, bytes); };
    return {edge(number), edge(number + 1)};
}

}  // namespace dist_prims
