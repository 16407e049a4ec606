#include "shared_copies.h"

#include <cstring>

#include "../common/shared_memory.h"
#include "../common/streaming.h"

namespace dist_prims {
namespace {

void copy(std::byte* to, const std::byte* from, std::size_t bytes, bool past_cache) {
    if (!past_cache) {
        std::memcpy(to, from, bytes);
        return;
    }
    copy_past_cache(to, from, bytes);
    end_past_cache();
}

std::chrono::nanoseconds time_of_copy(std::byte* to, const std::byte* from, std::size_t bytes, bool past_cache) {
    const auto begin = std::chrono::steady_clock::now();
    copy(to, from, bytes, past_cache);
    return std::chrono::steady_clock::now() - begin;
}

}  // namespace

void take_lines(const void* data, std::size_t bytes) {
    auto* const lines = static_cast<volatile std::byte*>(const_cast<void*>(data));
    for (std::size_t at = 0; at < bytes; at += kCacheLine) lines[at] = lines[at];
}

void copy_and_take(std::byte* to, const std::byte* from, std::size_t bytes) {
    for_blocks(bytes, [&](std::size_t begin, std::size_t length) {
        std::memcpy(to + begin, from + begin, length);
        take_lines(from + begin, length);
    });
}

void SharedWriter::write(std::byte* to, const std::byte* from, std::size_t bytes) {
    if (bytes == 0) return;
    std::size_t begin = 0;
    const bool is_long = bytes >= kLongWrite;
    if (is_long && long_writes_++ % kInterval == 0) {
        const auto past_cache = time_of_copy(to, from, kSample, true);
        const auto by_memcpy = time_of_copy(to + kSample, from + kSample, kSample, false);
        past_cache_ = goes_past_cache(by_memcpy, past_cache);
        begin = 2 * kSample;
    }
    copy(to + begin, from + begin, bytes - begin, is_long && past_cache_);
}

}  // namespace dist_prims
