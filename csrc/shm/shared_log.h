// An append-only list of short texts in the shared memory of a group's ranks, by which they agree on something after
// the group has ended: all ranks read the same texts in the same order.
//
//     entries   [ 16513 | 1 | 41 | 0 ...      where each text is: its offset from the first area, plus 1; 0: none yet
//     areas     rank 0: text, text ...        each rank writes its texts into an area of its own
//               rank 1: text ...
//
// A rank writes a text into its area and then appends it with one compare-and-swap of the first entry that is 0. A rank
// that stops or dies at any point therefore leaves the list complete: its text is in the list, or not.
//
// Memory order, for any processor: the text is written before the swap (release), and a reader loads the entry before
// the text (acquire). Entries never change again, so all ranks read the same list, or the beginning of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../common/shared_memory.h"

namespace dist_prims {

class SharedLog {
public:
    static std::size_t bytes(int size);

    // `place` points to bytes(size) of the shared memory, which begins as zeros.
    SharedLog(std::shared_ptr<const Mapping> memory, std::byte* place, int rank, int size);

    // Appends a text of this rank. Throws std::length_error if there is no space left.
    void append(const std::string& text);
    // The texts with the ranks that wrote them, in order.
    std::vector<std::pair<int, std::string>> read() const;

private:
    struct Entry;
    struct Head;

    Entry* entries() const;
    std::uint32_t write(const std::string& text);

    const std::shared_ptr<const Mapping> memory_;
    std::byte* const place_;
    const int rank_, size_;
    std::mutex guard_;      // of append()
    std::size_t used_ = 0;  // bytes of this rank's area
};

}  // namespace dist_prims
