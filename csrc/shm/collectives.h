// The collectives of one host, as phases of the slot exchange. Each works in segments that fit the slots, so every byte
// passes through the cache once, and each equals a registered schedule bit for bit:
//
//     all_reduce      "direct" (small), "two_shot" (large): both reduce in rank order
//     reduce          "reduce_scatter_gather" with direct parts; reduce_scatter "direct"; the others only move data
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "host_segment.h"

namespace dist_prims {

using Counts = std::vector<std::size_t>;       // one length for each rank
using Blocks = std::vector<const std::byte*>;  // one address for each rank, which is only read
using Places = std::vector<std::byte*>;        // one address for each rank, which is written

// Throws Mismatch if rank `from` sends more or fewer bytes than rank `to` expects. All ranks compare the same numbers,
// so the error is the same on all ranks. `rank`: this rank; `what`: the collective.
void must_match(int rank, const char* what, int from, std::uint64_t sent, int to, std::uint64_t awaited);

// Each function runs one collective, on the calling thread. All ranks must have opened the call (SlotExchange::open()).
// A function returns when the result is complete and the input may be written again.
// in, out: this rank's data and result; empty Blocks or Places on a rank that sends or receives none.
// count, counts: elements. bytes, outgoing, incoming: bytes.
// mine: the reference in this rank's call. If it is shared, `in` and `out` are the same. If the data of all ranks is in
// shared tensors, it is reduced there, in place.
void all_reduce(HostSegment& host_segment, DType dtype, Op op, const std::byte* in, std::byte* out, std::size_t count,
                const SharedTensorRef& mine = {});
// All-reduce of any size through the slots, never in place.
void all_reduce_by_slots(SlotExchange& slots, DType dtype, Op op, const std::byte* in, std::byte* out,
                         std::size_t count);
void reduce(HostSegment& host_segment, DType dtype, Op op, int root, const std::byte* in, std::byte* out,
            std::size_t count);
void reduce_scatter(SlotExchange& slots, DType dtype, Op op, const Blocks& in, std::byte* out, const Counts& counts);
void broadcast(SlotExchange& slots, std::size_t bytes, int root, std::byte* data);
void all_gather(SlotExchange& slots, const std::byte* in, const Places& out, const Counts& bytes);
void gather(SlotExchange& slots, int root, const std::byte* in, std::size_t bytes, const Places& out,
            const Counts& incoming);
void scatter(SlotExchange& slots, int root, const Blocks& in, std::byte* out, std::size_t bytes);
void all_to_all(SlotExchange& slots, const Blocks& in, const Counts& outgoing, const Places& out,
                const Counts& incoming);
void barrier(SlotExchange& slots);

}  // namespace dist_prims
