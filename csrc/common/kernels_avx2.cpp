// The loops of kernels_body.h, compiled for processors with avx2.
#include "kernels_sets.h"

#if DIST_PRIMS_X86
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace dist_prims::avx2 {
#include "kernels_body.h"
}  // namespace dist_prims::avx2
#pragma GCC pop_options
#endif
