#include "greeting.h"

namespace dist_prims {

Greeting::Greeting(int rank, int to, int lane, const std::string& key) : magic(kMagic), rank(rank), lane(lane) {
    code = authentication_code(
        key, "greeting " + std::to_string(rank) + " " + std::to_string(to) + " " + std::to_string(lane));
}

bool Greeting::is_valid(int to, const std::string& key, int ranks, int lanes) const {
    if (magic != kMagic || rank < 0 || rank >= ranks || lane < 0 || lane >= lanes) return false;
    const Greeting right(rank, to, lane, key);
    return is_equal_in_constant_time(code.data(), right.code.data(), code.size());
}

}  // namespace dist_prims
