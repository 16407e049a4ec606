// Stamps tell which pieces of an incremental sum each rank has added: one word for each piece, in a shared page of each
// sum and rank.
//
// A stamp is the token of its sum and rank, a random number, plus the number of the round, which begins at 1. So a
// stamp is never 0, which is what new memory holds. At the end of a round the ranks exchange their tokens and the
// locations of their stamps. Values that an earlier sum or another tensor has left in the same memory therefore do not
// count. A first design kept the stamps in front of the data and stamped with the round alone; a second sum on the same
// data found the stamps of the first.
//
// Memory order, for any processor: a rank writes the data of a piece, and ends copies past the cache, before it stores
// the stamp (release). A reader loads the stamps of all ranks before it reads the data of the piece and writes the
// result over it (acquire): no rank accesses that range again before the end of the round, whose phases order the data
// (in_place.h). tests/csrc/test_memory_order.py explores all executions.
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
    static constexpr std::size_t kCount = 512;  // 4 KB, the least that is shared

    struct Announcement {
        SharedTensorRef tensor_ref;
        std::uint64_t token;
    };
    // The stamps of all ranks, mapped in this process.
    struct All {
        MappedTensors mapped;
        std::vector<std::uint64_t> tokens;  // by rank

        // Whether all ranks have stamped a piece. False for the pieces from kCount on, which have none.
        bool are_set(std::size_t number, std::uint64_t round) const;
    };

    Stamps();
    explicit Stamps(std::uint64_t random);  // for tests: with the token that is made of this number
    ~Stamps() { exporter_.release(page_); }
    Stamps(const Stamps&) = delete;

    void set(std::size_t number, std::uint64_t round);

    // announce() writes this rank's announcement before a phase; announced() reads the announcements of all ranks after
    // the phase.
    void announce(SlotExchange& slots) const;
    static std::vector<Announcement> announced(const SlotExchange& slots);
    // Maps the stamps of all ranks, as map_tensors() of in_place.h.
    All map_tensors(HostSegment& host_segment, const std::vector<Announcement>& announced) const;

private:
    Exporter& exporter_;
    std::byte* const page_;
    const std::uint64_t token_;
};

}  // namespace dist_prims
