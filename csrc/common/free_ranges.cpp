#include "free_ranges.h"

#include <iterator>

namespace dist_prims {

std::optional<std::size_t> FreeRanges::take(std::size_t length) {
    const auto fit = by_length_.lower_bound({length, 0});
    if (fit == by_length_.end()) return std::nullopt;
    const auto [fit_length, begin] = *fit;
    remove(by_begin_.find(begin));
    if (fit_length > length) add(begin + length, fit_length - length);
    return begin;
}

void FreeRanges::give_back(std::size_t begin, std::size_t length) {
    auto after = by_begin_.upper_bound(begin);
    if (after != by_begin_.begin()) {
        const auto before = std::prev(after);
        if (before->first + before->second == begin) {
            begin = before->first;
            length += before->second;
            remove(before);
        }
    }
    if (after != by_begin_.end() && begin + length == after->first) {
        length += after->second;
        remove(after);
    }
    add(begin, length);
}

void FreeRanges::add(std::size_t begin, std::size_t length) {
    by_begin_.emplace(begin, length);
    by_length_.emplace(length, begin);
}

void FreeRanges::remove(ByBegin::iterator range) {
    by_length_.erase({range->second, range->first});
    by_begin_.erase(range);
}

}  // namespace dist_prims
