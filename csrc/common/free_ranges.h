// The free ranges of an address space: a best-fit allocator that merges neighbours, O(log n) for n free ranges.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace dist_prims {

class FreeRanges {
public:
    explicit FreeRanges(std::size_t size) { add(0, size); }

    // The beginning of `length` bytes that were free: in the smallest free range that is long enough. None if there is
    // no such range.
    std::optional<std::size_t> take(std::size_t length);
    void give_back(std::size_t begin, std::size_t length);

    std::size_t count() const { return by_begin_.size(); }

private:
    using ByBegin = std::map<std::size_t, std::size_t>;  // to the length

    void add(std::size_t begin, std::size_t length);
    void remove(ByBegin::iterator range);

    ByBegin by_begin_;
    std::set<std::pair<std::size_t, std::size_t>> by_length_;  // length, begin
};

}  // namespace dist_prims
