// Stamps tell which pieces of an incremental sum each rank has added: one stamp for each piece, in a shared page of
// each sum and rank.
//
// A stamp is the token of its sum and rank, a random number, plus the number of the round. The token is below 2^63, so
// a stamp is never 0, which is what new memory holds. At the end of a round the ranks exchange their tokens and the
// locations of their stamps, so a value that an earlier sum or another tensor left in the same memory is not taken for
// a stamp. A first design kept the stamps in front of the data and stamped with the round alone; a second sum on the
// same data found the stamps of the first.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "host_segment.h"
#include "in_place.h"

namespace dist_prims {

class Stamps {
public:
    static constexpr std::size_t kCount = 512;  // a page

    struct Announcement {
        SharedTensorRef tensor_ref;
        std::uint64_t token;
    };
    // The stamps of all ranks, mapped in this process.
    struct All {
        MappedTensors mapped;
        std::vector<std::uint64_t> tokens;

        // Whether all ranks have stamped a piece.
        bool are_set(std::size_t number, std::uint64_t round) const;
    };

    Stamps();
    explicit Stamps(std::uint64_t random);  // for tests: with the token that is made of this number
    ~Stamps();
    Stamps(const Stamps&) = delete;

    void set(std::size_t number, std::uint64_t round);

    // announce() is called before a phase and announced() after it.
    void announce(SlotExchange& slots) const;
    static std::vector<Announcement> announced(const SlotExchange& slots);
    // Maps the stamps of all ranks; empty if some rank cannot map another's. All ranks call it in the same phase.
    All map_tensors(HostSegment& host_segment, const std::vector<Announcement>& announced) const;

private:
    Exporter& exporter_;
    std::byte* const page_;
    const std::uint64_t token_;
};

}  // namespace dist_prims
