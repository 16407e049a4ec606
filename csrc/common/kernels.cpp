#include "kernels.h"

#include <bit>
#include <cmath>
#include <numeric>

#include "kernels_sets.h"

namespace dist_prims {
namespace {

struct KernelSet {
    const char* name;
    decltype(&generic::fold) fold;
    decltype(&generic::mean) mean;
    decltype(&generic::divide) divide;
    decltype(&generic::scale) scale;
    decltype(&generic::multiply) multiply;
};

KernelSet best_set() {
#if DIST_PRIMS_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        return {"avx512", avx512::fold, avx512::mean, avx512::divide, avx512::scale, avx512::multiply};
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return {"avx2", avx2::fold, avx2::mean, avx2::divide, avx2::scale, avx2::multiply};
#endif
    return {"generic", generic::fold, generic::mean, generic::divide, generic::scale, generic::multiply};
}

const KernelSet& kernel_set() {
    static const KernelSet set = best_set();
    return set;
}

// The e of a carried sum of `terms` addends, sum / 2^e: 2^e is the least power of two that is no less than `terms`.
int carry_exponent(int terms) {
    return std::bit_width(static_cast<unsigned>(terms - 1));
}

}  // namespace

void fold(Op op, DType dtype, void* out, const void* const* in, int inputs, std::size_t count) {
    kernel_set().fold(op, dtype, out, in, inputs, count);
}

void fold_terms(Op op, DType dtype, void* out, const std::vector<const void*>& in, const std::vector<int>& terms,
                int ranks, std::size_t count) {
    const int inputs = static_cast<int>(in.size());
    const bool is_plain = op != Op::kAvg || inputs == 1;
    if (is_plain) return fold(op == Op::kAvg ? Op::kSum : op, dtype, out, in.data(), inputs, count);
    const int whole = terms.empty() ? inputs : std::accumulate(terms.begin(), terms.end(), 0);
    if (dtype != DType::kFloat16 && dtype != DType::kBFloat16) {
        fold(Op::kSum, dtype, out, in.data(), inputs, count);
        if (whole == ranks) kernel_set().divide(dtype, out, ranks, count);
        return;
    }
    // Half types: multiply each input, a carried sum itself, so that the result is a carried sum of all terms. The last
    // step divides that by ranks / 2^e, which leaves the mean.
    std::vector<float> scales(in.size(), std::ldexp(1.0f, -carry_exponent(whole)));
    for (std::size_t input = 0; input < terms.size(); ++input)
        scales[input] = std::ldexp(scales[input], carry_exponent(terms[input]));
    const float divisor = whole == ranks ? std::ldexp(static_cast<float>(ranks), -carry_exponent(whole)) : 1.0f;
    kernel_set().mean(dtype, out, in.data(), scales.data(), inputs, divisor, count);
}

void fold_ranks(Op op, DType dtype, void* out, const std::vector<const void*>& in, std::size_t count) {
    const int ranks = static_cast<int>(in.size());
    if (op != Op::kAvg) return fold(op, dtype, out, in.data(), ranks, count);
    fold_terms(op, dtype, out, in, {}, ranks, count);
}

void scale(DType dtype, void* out, const void* in, double factor, std::size_t count) {
    kernel_set().scale(dtype, out, in, factor, count);
}

void multiply(DType dtype, void* out, const void* in, std::uint64_t factor, std::size_t count) {
    kernel_set().multiply(dtype, out, in, factor, count);
}

const char* instruction_set() {
    return kernel_set().name;
}

}  // namespace dist_prims
