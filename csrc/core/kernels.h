// Reductions of buffers: out = ((in[0] op in[1]) op in[2]) ..., element by element, in that order.
//
// The order is the point: whoever folds the ranks' buffers in the order of ranks gets the same bits, in one process or
// in many. float16 and bfloat16 are added in float32 and rounded once a fold.
#pragma once

#include <cstddef>
#include <vector>

#include "types.h"

namespace dist_prims {

// `out` may be one of the inputs. The mean (Op::kAvg) is folded as a sum; see divide().
void fold(Op op, DType dtype, void* out, const void* const* in, int inputs, std::size_t count);

// What is left of a mean once all is added.
void divide(DType dtype, void* data, int divisor, std::size_t count);

// Of a buffer of each rank, in the order of ranks; a mean is divided too.
void fold_ranks(Op op, DType dtype, void* out, const std::vector<const void*>& in, std::size_t count);

// out = in * factor, for real numbers; out may be in.
void scale(DType dtype, void* out, const void* in, double factor, std::size_t count);

// The instruction set that was picked for this processor: "avx512", "avx2" or "generic".
const char* instruction_set();

}  // namespace dist_prims
