// The loops of kernels_body.h, compiled for processors with avx512.
#include "kernels_sets.h"

#if DIST_PRIMS_X86
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
namespace dist_prims::avx512 {
#include "kernels_body.h"
}  // namespace dist_prims::avx512
#pragma GCC pop_options
#endif
