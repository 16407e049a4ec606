// Copies to and from memory that ranks on several cores write and read in turn.
//
// Before a core writes a cache line, the caches of all other cores have to drop it. Two measures keep that short:
// - A rank that alone reads some data takes its lines (take_lines): 1 MB by send and recv takes 0.44 of the time.
// - Where the reader's core does not share its last cache with the writer's, memcpy takes 3 to 10 times as long as a
//   copy past the cache, and an all_reduce of 1 MB takes 7 times as long with it. Where they share it, the data stays
//   there for the reader, and calls take 1.1 to 2.3 times as long past the cache. A virtual machine does not show
//   which cores share a cache, and threads move. So SharedWriter measures both at intervals.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace dist_prims {

// Stores a byte of each cache line back, unchanged. `data`: bytes from the beginning of a line that this rank has read
// and that no other rank reads; their writer must see that before it writes again (acquire).
//
// This core then owns the lines alone. Without these stores both cores keep a copy, and the next write has to wait for
// the end of the reader's copy: with cores that share their last cache, 3.5 us for 32 KB instead of 0.8.
void take_lines(const void* data, std::size_t bytes);

// Calls use(begin, length) for each block of `bytes`. A block stays in the first-level cache until its lines are taken.
template <typename Use>
void for_blocks(std::size_t bytes, const Use& use) {
    constexpr std::size_t kBlock = 2048;
    for (std::size_t begin = 0; begin < bytes; begin += kBlock) use(begin, std::min(kBlock, bytes - begin));
}

// memcpy() and take_lines(from).
void copy_and_take(std::byte* to, const std::byte* from, std::size_t bytes);

class SharedWriter {
public:
    // The copy is ordered before later stores. `to` and `from` may be null if `bytes` is 0.
    void write(std::byte* to, const std::byte* from, std::size_t bytes);

    // The rule, from the times of two equal parts. A copy past the cache must gain more than its readers lose: they
    // have to fetch the data from memory. The measured ratios of the times were 0.25 to 1.2 with a shared last cache;
    // without one 3 to 10, and 1 to 3 for input that is in no cache.
    static bool goes_past_cache(std::chrono::nanoseconds by_memcpy, std::chrono::nanoseconds past_cache) {
        return by_memcpy > 2 * past_cache;
    }
    // For tests: how to write until the next measurement.
    void set_past_cache(bool value) { past_cache_ = value, long_writes_ = 1; }

    static constexpr std::size_t kLongWrite = 64 << 10, kSample = 16 << 10;  // bytes
    static constexpr std::uint32_t kInterval = 16;                           // long writes

private:
    bool past_cache_ = false;
    std::uint32_t long_writes_ = 0;
};

}  // namespace dist_prims
