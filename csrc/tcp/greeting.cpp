#include "greeting.h"

#include <algorithm>

namespace dist_prims {

Greeting::Greeting(int rank, int lane, const std::string& token) : magic(kMagic), rank(rank), lane(lane) {
    std::copy_n(token.begin(), std::min(token.size(), kTokenBytes), this->token.begin());
}

bool Greeting::is_valid(const std::string& expected, int ranks, int lanes) const {
    const Greeting right(rank, lane, expected);
    unsigned char difference = 0;
    for (std::size_t each = 0; each < kTokenBytes; ++each)
        difference = static_cast<unsigned char>(difference | (token[each] ^ right.token[each]));
    return difference == 0 && magic == kMagic && rank >= 0 && rank < ranks && lane >= 0 && lane < lanes;
}

}  // namespace dist_prims
