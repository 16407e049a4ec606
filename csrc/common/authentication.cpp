#include "authentication.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>

namespace dist_prims {
namespace {

constexpr std::size_t kBlock = 64;  // bytes that are hashed at a time

constexpr std::array<std::uint32_t, 64> kConstants{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

class Sha256 {
public:
    void update(std::string_view text) {
        total_ += text.size();
        while (!text.empty()) {
            const std::size_t part = std::min(text.size(), kBlock - filled_);
            std::memcpy(block_.data() + filled_, text.data(), part);
            text.remove_prefix(part);
            filled_ += part;
            if (filled_ == kBlock) compress();
        }
    }

    Digest finish() {
        const std::uint64_t bits = total_ * 8;
        update(std::string_view("\x80", 1));
        while (filled_ != kBlock - sizeof(bits)) update(std::string_view("", 1));
        std::array<char, sizeof(bits)> length;
        for (std::size_t each = 0; each < length.size(); ++each)
            length[each] = static_cast<char>(bits >> (56 - 8 * each));
        update({length.data(), length.size()});
        Digest digest;
        for (std::size_t each = 0; each < digest.size(); ++each)
            digest[each] = static_cast<unsigned char>(state_[each / 4] >> (24 - 8 * (each % 4)));
        return digest;
    }

private:
    void compress() {
        std::array<std::uint32_t, 64> words;
        for (std::size_t n = 0; n < 16; ++n) {
            const unsigned char* const from = block_.data() + 4 * n;
            words[n] = std::uint32_t{from[0]} << 24 | std::uint32_t{from[1]} << 16 | std::uint32_t{from[2]} << 8 |
                       std::uint32_t{from[3]};
        }
        for (std::size_t n = 16; n < 64; ++n) {
            const std::uint32_t low = words[n - 15], high = words[n - 2];
            words[n] = words[n - 16] + (std::rotr(low, 7) ^ std::rotr(low, 18) ^ low >> 3) + words[n - 7] +
                       (std::rotr(high, 17) ^ std::rotr(high, 19) ^ high >> 10);
        }
        auto [a, b, c, d, e, f, g, h] = state_;
        for (std::size_t n = 0; n < 64; ++n) {
            const std::uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                                        ((e & f) ^ (~e & g)) + kConstants[n] + words[n];
            const std::uint32_t second =
                (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
        }
        const std::array<std::uint32_t, 8> after{a, b, c, d, e, f, g, h};
        for (std::size_t n = 0; n < state_.size(); ++n) state_[n] += after[n];
        filled_ = 0;
    }

    std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<unsigned char, kBlock> block_{};
    std::size_t filled_ = 0;   // bytes of the block
    std::uint64_t total_ = 0;  // bytes in all
};

std::string_view view(const Digest& digest) {
    return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

Digest sha256(std::string_view text) {
    Sha256 hash;
    hash.update(text);
    return hash.finish();
}

}  // namespace

Digest authentication_code(std::string_view key, std::string_view text) {
    // The key as one block: a longer key is replaced by its hash, a shorter key is padded with zeros.
    const Digest hashed_key = sha256(key);
    std::string padded(key.size() > kBlock ? view(hashed_key) : key);
    padded.resize(kBlock);
    const auto masked = [&](char mask) {
        std::string block = padded;
        for (char& byte : block) byte = static_cast<char>(byte ^ mask);
        return block;
    };
    Sha256 inner, outer;
    inner.update(masked(0x36));
    inner.update(text);
    outer.update(masked(0x5c));
    outer.update(view(inner.finish()));
    return outer.finish();
}

bool is_equal_in_constant_time(const unsigned char* one, const unsigned char* other, std::size_t bytes) {
    unsigned difference = 0;
    for (std::size_t each = 0; each < bytes; ++each) difference |= static_cast<unsigned>(one[each] ^ other[each]);
    return difference == 0;
}

}  // namespace dist_prims
