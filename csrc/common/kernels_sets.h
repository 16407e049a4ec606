// The instruction sets that the reductions are compiled for, and what kernels_body.h includes.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#include "types.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DIST_PRIMS_X86 1  // elsewhere the compiler's own target serves: NEON is part of every 64-bit Arm
#else
#define DIST_PRIMS_X86 0
#endif

#define DIST_PRIMS_DECLARE(set)                                                                              \
    namespace set {                                                                                          \
    void fold(Op op, DType dtype, void* out, const void* const* in, int inputs, std::size_t count);          \
    void mean(DType dtype, void* out, const void* const* in, const float* scales, int inputs, float divisor, \
              std::size_t count);                                                                            \
    void divide(DType dtype, void* data, int divisor, std::size_t count);                                    \
    void scale(DType dtype, void* out, const void* in, double factor, std::size_t count);                    \
    void multiply(DType dtype, void* out, const void* in, std::uint64_t factor, std::size_t count);          \
    }

namespace dist_prims {
DIST_PRIMS_DECLARE(generic)
DIST_PRIMS_DECLARE(avx2)
DIST_PRIMS_DECLARE(avx512)
}  // namespace dist_prims

#undef DIST_PRIMS_DECLARE
