// A checksum of whole numbers or of a text, to compare them between ranks: two that differ have the same checksum with
// a probability of 2^-64. Texts can be chosen so that they have the same checksum, so it is no signature.
#pragma once

#include <cstdint>
#include <string>

namespace dist_prims {

class Checksum {
public:
    Checksum& add(std::uint64_t value) {
        sum_ = mixed((sum_ ^ value) + 0x9e3779b97f4a7c15u);
        return *this;
    }
    Checksum& add(const std::string& text) {
        for (const char each : text) add(std::uint64_t{static_cast<unsigned char>(each)});
        return *this;
    }
    std::uint64_t value() const { return sum_; }

private:
    // A permutation in which each bit of the result depends on all bits, as in splitmix64.
    static std::uint64_t mixed(std::uint64_t bits) {
        bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
        bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
        return bits ^ (bits >> 31);
    }

    std::uint64_t sum_ = 0;
};

}  // namespace dist_prims
