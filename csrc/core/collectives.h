// The collectives of one host, as phases of a board. Each works in segments that fit the board's slots, so every byte
// passes through the cache once, and each equals a registered schedule bit for bit:
//
//     all_reduce      "direct" (small), "two_shot" (large): both fold in the order of ranks
//     reduce          "reduce_scatter_gather" with direct parts; reduce_scatter "direct"; the others only move
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "room.h"

namespace dist_prims {

using Counts = std::vector<std::size_t>;
using Blocks = std::vector<const std::byte*>;  // a place for each rank
using Places = std::vector<std::byte*>;

// Raises Mismatch where one rank sends another more or less than that expects; the same error on all ranks.
void must_match(int rank, const char* what, int from, std::uint64_t sent, int to, std::uint64_t awaited);

// Each returns when the result is there and the input may be written again. The call must have been opened.
// `mine`: where this rank's data lies, as its call says. If it is lent by all ranks it is reduced there (in == out).
void all_reduce(Room& room, DType dtype, Op op, const std::byte* in, std::byte* out, std::size_t count,
                const Loan& mine = {});
// However large or small it is, through the slots and not in lent memory.
void all_reduce_by_slots(Board& board, DType dtype, Op op, const std::byte* in, std::byte* out, std::size_t count);
void reduce(Room& room, DType dtype, Op op, int root, const std::byte* in, std::byte* out, std::size_t count);
void reduce_scatter(Board& board, DType dtype, Op op, const Blocks& in, std::byte* out, const Counts& counts);
void broadcast(Board& board, std::size_t bytes, int root, std::byte* data);
void all_gather(Board& board, const std::byte* in, const Places& out, const Counts& bytes);
void gather(Board& board, int root, const std::byte* in, std::size_t bytes, const Places& out, const Counts& incoming);
void scatter(Board& board, int root, const Blocks& in, std::byte* out, std::size_t bytes);
void all_to_all(Board& board, const Blocks& in, const Counts& outgoing, const Places& out, const Counts& incoming);
void barrier(Board& board);

}  // namespace dist_prims
