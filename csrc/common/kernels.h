// Reductions of buffers: out = ((in[0] op in[1]) op in[2]) ..., element by element, in that order.
//
// The order matters: a reduction of the ranks' buffers in rank order gives the same bits in one process and in many.
// float16 and bfloat16 are added in float32 and rounded once per fold.
//
// A mean (Op::kAvg) is the sum, divided within the last fold: half types are divided before they are rounded, so a mean
// is finite where the sum of its addends is not. A schedule may add in several steps, and a half type must not overflow
// in between: a sum of several addends is carried as sum / 2^e, where 2^e is the least power of two that is no less
// than the number of addends. This loses no bits except below the normal range. The mean of integers is the sum, which
// wraps as SUM does, divided and truncated towards zero, as in NCCL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "types.h"

namespace dist_prims {

// Any reduction but a mean. `out` may be one of the inputs.
void fold(Op op, DType dtype, void* out, const void* const* in, int inputs, std::size_t count);

// One step of any reduction over `ranks` ranks. Input i holds the data of terms[i] ranks, or of one rank each if
// `terms` is empty. The step whose inputs hold the data of all ranks is the last one.
void fold_terms(Op op, DType dtype, void* out, const std::vector<const void*>& in, const std::vector<int>& terms,
                int ranks, std::size_t count);

// Reduces one buffer of each rank, in rank order.
void fold_ranks(Op op, DType dtype, void* out, const std::vector<const void*>& in, std::size_t count);

// out = in * factor, for real and complex numbers. `out` may equal `in`.
void scale(DType dtype, void* out, const void* in, double factor, std::size_t count);

// The same for integers, which wrap. `factor` contains the low bits of the factor.
void multiply(DType dtype, void* out, const void* in, std::uint64_t factor, std::size_t count);

// The instruction set that was picked for this processor: "avx512", "avx2" or "generic".
const char* instruction_set();

}  // namespace dist_prims
