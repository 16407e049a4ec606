#include "kernels.h"

#include "kernels_sets.h"

namespace dist_prims {
namespace {

struct Set {
    const char* name;
    decltype(&generic::fold) fold;
    decltype(&generic::divide) divide;
};

Set pick() {
#if DIST_PRIMS_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        return {"avx512", avx512::fold, avx512::divide};
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {"avx2", avx2::fold, avx2::divide};
#endif
    return {"generic", generic::fold, generic::divide};
}

const Set& picked() {
    static const Set set = pick();
    return set;
}

}  // namespace

void fold(Op op, DType dtype, void* out, const void* const* in, int inputs, std::size_t count) {
    picked().fold(op, dtype, out, in, inputs, count);
}

void divide(DType dtype, void* data, int divisor, std::size_t count) {
    picked().divide(dtype, data, divisor, count);
}

const char* instruction_set() {
    return picked().name;
}

}  // namespace dist_prims
