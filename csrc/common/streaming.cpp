#include "streaming.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)  // part of every x86-64: wider stores would fill the same lines
#include <emmintrin.h>
#endif

namespace dist_prims {

#if defined(__SSE2__)

void copy_past_cache(std::byte* to, const std::byte* from, std::size_t bytes) {
    constexpr std::size_t kLine = 64, kWord = sizeof(__m128i);
    const std::size_t head = std::min((kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine, bytes);
    const std::size_t end = head + (bytes - head) / kLine * kLine;
    std::memcpy(to, from, head);
    for (std::size_t at = head; at < end; at += kLine) {
        __m128i words[kLine / kWord];
        std::memcpy(words, from + at, kLine);
        for (std::size_t word = 0; word < kLine / kWord; ++word)
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + at) + word, words[word]);
    }
    std::memcpy(to + end, from + end, bytes - end);
}

void end_past_cache() {
    _mm_sfence();
}

#else

void copy_past_cache(std::byte* to, const std::byte* from, std::size_t bytes) {
    std::memcpy(to, from, bytes);
}

void end_past_cache() {}

#endif

}  // namespace dist_prims
