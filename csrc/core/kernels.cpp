#include "kernels.h"

#include "kernels_sets.h"

namespace dist_prims {
namespace {

struct Set {
    const char* name;
    decltype(&generic::fold) fold;
    decltype(&generic::divide) divide;
    decltype(&generic::scale) scale;
};

Set pick() {
#if DIST_PRIMS_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        return {"avx512", avx512::fold, avx512::divide, avx512::scale};
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return {"avx2", avx2::fold, avx2::divide, avx2::scale};
#endif
    return {"generic", generic::fold, generic::divide, generic::scale};
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

void fold_ranks(Op op, DType dtype, void* out, const std::vector<const void*>& in, std::size_t count) {
    const int ranks = static_cast<int>(in.size());
    fold(op, dtype, out, in.data(), ranks, count);
    if (op == Op::kAvg) divide(dtype, out, ranks, count);
}

void scale(DType dtype, void* out, const void* in, double factor, std::size_t count) {
    picked().scale(dtype, out, in, factor, count);
}

const char* instruction_set() {
    return picked().name;
}

}  // namespace dist_prims
