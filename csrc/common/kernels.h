// Reductions of buffers: out = ((in[0] op in[1]) op in[2]) ..., element by element, in that order.
//
// The order matters: a reduction of the ranks' buffers in rank order gives the same bits in one process and in many.
// float16 and bfloat16 are added in float32 and rounded once a fold.
//
// A mean (Op::kAvg) is the sum, divided within the last fold: of half types before they are rounded, so that a mean is
// finite where the sum of its addends is not. A schedule may add in several steps, and a half type must not overflow in
// between: a sum of several addends is carried as sum / 2^e, where 2^e is the least power of two that is no less than
// the number of addends. This loses no bits except below the normal range. The mean of integers is the sum, which wraps
// as SUM does, divided and truncated towards zero, as in NCCL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "types.h"

namespace dist_prims {

// `out` may be one of the inputs. Of any reduction but a mean.
void fold(Op op, DType dtype, void* out, const void* const* in, int inputs, std::size_t count);

// The e of a sum of `terms` addends.
int carried_exponent(int terms);

// One step of any reduction over `ranks` ranks, where input i holds what terms[i] of them have brought; no terms: one
// rank each. The step whose inputs hold all ranks' is the last one.
void fold_terms(Op op, DType dtype, void* out, const std::vector<const void*>& in, const std::vector<int>& terms,
                int ranks, std::size_t count);

// Of a buffer of each rank, in the order of ranks.
void fold_ranks(Op op, DType dtype, void* out, const std::vector<const void*>& in, std::size_t count);

// In place; of whole numbers cut off towards zero. Not of half types: see above.
void divide(DType dtype, void* data, int divisor, std::size_t count);

// out = in * factor, for real and complex numbers; out may be in.
void scale(DType dtype, void* out, const void* in, double factor, std::size_t count);

// The same for whole numbers, which wrap; the factor as its low bits.
void multiply(DType dtype, void* out, const void* in, std::uint64_t factor, std::size_t count);

// The instruction set that was picked for this processor: "avx512", "avx2" or "generic".
const char* instruction_set();

}  // namespace dist_prims
