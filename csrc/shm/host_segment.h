// The shared memory of the ranks of one host: one segment that holds their membership, slots, ring buffers for messages
// and the log by which the survivors of a failure agree.
#pragma once

#include <algorithm>
#include <memory>

#include "membership.h"
#include "p2p.h"
#include "shared_log.h"
#include "shared_tensors.h"
#include "slot_exchange.h"

namespace dist_prims {

struct HostSegment {
    // The minimum slot size. all_to_all posts 16 bytes of lengths for each rank, and after them a piece of its data for
    // each rank; an all_reduce posts size + 1 pieces. A piece is cut to whole cache lines (64 bytes), and must not be
    // empty: with 256 bytes for each rank and for one more it has at least 3 lines.
    static std::size_t min_slot_bytes(int size) {
        return std::max<std::size_t>(4096, 256 * (static_cast<std::size_t>(size) + 1));
    }

    static std::size_t bytes(int size, std::size_t slot) {
        return Membership::bytes(size) + SlotExchange::bytes(size, slot) + PointToPoint::bytes(size) +
               SharedLog::bytes(size);
    }

    // Makes the memory on rank 0, with the pages that rank 0 reserves.
    static Descriptor make_memory(int size, std::size_t slot) {
        const std::size_t of_all_ranks = bytes(size, slot);
        Descriptor memory = make_sparse_memory("dist_prims", of_all_ranks);
        check_available(of_all_ranks);  // what each rank reserves may be too little to be checked
        reserve_pages(memory, 0, size, slot);
        return memory;
    }

    // Reserves the slots of a rank and the ring buffers to which it writes; rank 0 reserves all other pages too. The
    // kernel takes the pages from the NUMA node of the calling thread, so every rank calls this itself. No rank reads
    // pages that another rank has yet to reserve: that rank has not posted a phase or a message.
    static void reserve_pages(const Descriptor& memory, int rank, int size, std::size_t slot) {
        const auto reserve_range = [&](std::size_t begin, std::size_t end) { reserve(memory, begin, end - begin); };
        const std::size_t exchange = Membership::bytes(size);
        const std::size_t rings = exchange + SlotExchange::bytes(size, slot);
        const auto slots_end = exchange + SlotExchange::slots_begin(size, rank + 1, slot);
        reserve_range(rank == 0 ? 0 : exchange + SlotExchange::slots_begin(size, rank, slot), slots_end);
        reserve_range(rings + PointToPoint::rings_begin(size, rank), rings + PointToPoint::rings_begin(size, rank + 1));
        if (rank == 0) reserve_range(rings + PointToPoint::bytes(size), bytes(size, slot));
    }

    // For tests: sets the counters in new memory, before a rank uses it.
    struct Counters {
        std::uint64_t phase = 0, ring = 0;  // ring: bytes written to and read from each ring buffer; a multiple of 64
        std::uint32_t wakes = 0;
        std::uint64_t heartbeats = 0;
    };
    static void set_counters(const Mapping& memory, int size, std::size_t slot, const Counters& counters) {
        Membership::set_counters(memory.data(), size, counters.wakes, counters.heartbeats);
        SlotExchange::set_counters(memory.data() + Membership::bytes(size), size, counters.phase);
        PointToPoint::set_counters(memory.data() + Membership::bytes(size) + SlotExchange::bytes(size, slot), size,
                                   counters.ring);
    }

    HostSegment(std::shared_ptr<const Mapping> memory, int rank, int size, std::size_t slot, RankNames names = {})
        : shared_membership_(std::make_shared<Membership>(memory, memory->data(), rank, size, std::move(names))),
          shared_p2p_(std::make_shared<PointToPoint>(
              memory, memory->data() + Membership::bytes(size) + SlotExchange::bytes(size, slot), shared_membership_)),
          membership(*shared_membership_),
          slots(memory, memory->data() + Membership::bytes(size), membership, slot),
          p2p(*shared_p2p_),
          log(memory, memory->data() + bytes(size, slot) - SharedLog::bytes(size), rank, size) {
        if (memory->size() < bytes(size, slot))
            throw std::runtime_error("the shared memory is too small for the ranks");
    }
    ~HostSegment() {
        p2p.close(nullptr);
        membership.leave();
    }
    HostSegment(const HostSegment&) = delete;

private:
    // Shared with the progress thread of p2p, which may outlive this object.
    const std::shared_ptr<Membership> shared_membership_;
    const std::shared_ptr<PointToPoint> shared_p2p_;

public:
    // The shared-tensor reference of the data of an all_reduce; empty if the data is not in a shared tensor, or is so
    // small that the all_reduce does not work in place.
    SharedTensorRef tensor_ref_of(const std::byte* data, std::size_t bytes) const {
        return bytes > std::min(one_shot_bytes, slots.capacity()) ? Exporter::instance().ref_of(data, bytes)
                                                                  : SharedTensorRef{};
    }

    Membership& membership;
    SlotExchange slots;
    PointToPoint& p2p;
    SharedLog log;
    Importer importer;
    // Up to this size, each rank of an all_reduce or reduce posts all of its data in one phase, and reduces the data of
    // all ranks. Above it each rank reduces one chunk, and the ranks collect the sums in further phases.
    std::size_t one_shot_bytes = 32 << 10;
};

}  // namespace dist_prims
