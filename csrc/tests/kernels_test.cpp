// Every reduction of every type, against plain arithmetic, and on every instruction set that this processor has.
#include "../common/kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "../common/kernels_sets.h"
#include "test_support.h"

using namespace dist_prims;

namespace reference {
#include "../common/kernels_body.h"  // for the conversions of half types, which tests/backend/test_backend.py has checked
}

namespace {

constexpr std::size_t kCounts[] = {0, 1, 7, 513, 1100};
constexpr int kMostRanks = 9;

template <typename T>
using Buffers = std::vector<std::vector<T>>;

template <typename T>
std::vector<const void*> places(const Buffers<T>& buffers) {
    std::vector<const void*> found;
    for (const auto& each : buffers) found.push_back(each.data());
    return found;
}

template <typename T>
Buffers<T> random_bits(int ranks, std::size_t count, std::mt19937_64& random) {
    Buffers<T> buffers(static_cast<std::size_t>(ranks), std::vector<T>(count));
    for (auto& each : buffers) {
        for (T& element : each) {
            const std::uint64_t bits = random();
            std::memcpy(&element, &bits, sizeof(T));
        }
    }
    return buffers;
}

template <typename T>
T whole_reference(Op op, const Buffers<T>& in, std::size_t at) {
    using U = std::make_unsigned_t<T>;
    T total = in[0][at];
    for (std::size_t rank = 1; rank < in.size(); ++rank) {
        const T next = in[rank][at];
        const auto a = static_cast<std::uint64_t>(total), b = static_cast<std::uint64_t>(next);
        switch (op) {
            case Op::kProduct:
                total = static_cast<T>(static_cast<U>(a * b));
                break;
            case Op::kMin:
                total = std::min(total, next);
                break;
            case Op::kMax:
                total = std::max(total, next);
                break;
            case Op::kBitAnd:
                total = static_cast<T>(a & b);
                break;
            case Op::kBitOr:
                total = static_cast<T>(a | b);
                break;
            case Op::kBitXor:
                total = static_cast<T>(a ^ b);
                break;
            default:
                total = static_cast<T>(static_cast<U>(a + b));
        }
    }
    if (op != Op::kAvg) return total;
    const auto ranks = static_cast<int>(in.size());  // C++ cuts off towards zero
    return std::is_signed_v<T> ? static_cast<T>(static_cast<std::int64_t>(total) / ranks)
                               : static_cast<T>(static_cast<std::uint64_t>(total) / static_cast<unsigned>(ranks));
}

template <typename T>
void whole_numbers(DType dtype) {
    std::mt19937_64 random(1);
    for (const std::size_t count : kCounts) {
        for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
            const Buffers<T> in = random_bits<T>(ranks, count, random);
            for (int op = 0; op < static_cast<int>(Op::kNone); ++op) {
                std::vector<T> out(count);
                fold_ranks(static_cast<Op>(op), dtype, out.data(), places(in), count);
                for (std::size_t i = 0; i < count; ++i) CHECK(out[i] == whole_reference(static_cast<Op>(op), in, i));
            }
            const std::uint64_t factor = random();
            std::vector<T> out(count);
            multiply(dtype, out.data(), in[0].data(), factor, count);
            for (std::size_t i = 0; i < count; ++i)
                CHECK(out[i] == static_cast<T>(static_cast<std::make_unsigned_t<T>>(
                                    static_cast<std::uint64_t>(in[0][i]) * factor)));
        }
    }
}

// Any byte but 0 is true.
CASE(reductions_of_bool) {
    std::mt19937_64 random(2);
    for (int ranks = 2; ranks <= kMostRanks; ++ranks) {
        Buffers<std::uint8_t> in = random_bits<std::uint8_t>(ranks, 1100, random);
        for (auto& each : in) {
            for (std::uint8_t& byte : each) byte = byte % 2 ? byte : 0;
        }
        for (const Op op : {Op::kSum, Op::kProduct, Op::kMin, Op::kMax, Op::kBitAnd, Op::kBitOr, Op::kBitXor}) {
            std::vector<std::uint8_t> out(1100);
            fold_ranks(op, DType::kBool, out.data(), places(in), out.size());
            for (std::size_t i = 0; i < out.size(); ++i) {
                const auto set = std::count_if(in.begin(), in.end(), [i](const auto& each) { return each[i] != 0; });
                const bool all = set == ranks, any = set != 0, odd = set % 2 != 0;
                const bool is_and = op == Op::kProduct || op == Op::kMin || op == Op::kBitAnd;
                CHECK(out[i] == (is_and ? all : op == Op::kBitXor ? odd : any));
            }
        }
    }
}

// Small whole numbers, of which no result is rounded but the mean.
template <typename T>
void real_numbers(DType dtype, std::size_t parts) {
    for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
        const std::size_t count = 1100;
        Buffers<T> in(static_cast<std::size_t>(ranks), std::vector<T>(count * parts));
        for (std::size_t rank = 0; rank < in.size(); ++rank) {
            for (std::size_t i = 0; i < in[rank].size(); ++i) in[rank][i] = static_cast<T>((i + 3 * rank) % 7) - 3;
        }
        std::vector<T> sum(count * parts), mean(count * parts), scaled(count * parts), product(count * parts);
        fold_ranks(Op::kSum, dtype, sum.data(), places(in), count);
        fold_ranks(Op::kAvg, dtype, mean.data(), places(in), count);
        fold_ranks(Op::kProduct, dtype, product.data(), places(in), count);
        scale(dtype, scaled.data(), in[0].data(), 0.1, count);
        for (std::size_t i = 0; i < sum.size(); ++i) {
            T total = 0, one[2] = {1, 0};
            for (const auto& each : in) {
                total += each[i];
                const T a = one[0], b = one[1], c = each[i - i % parts], d = parts == 2 ? each[i | 1] : 0;
                one[0] = a * c - b * d;
                one[1] = a * d + b * c;
            }
            CHECK(sum[i] == total && mean[i] == total / static_cast<T>(ranks));
            CHECK(scaled[i] == in[0][i] * static_cast<T>(0.1));
            CHECK(product[i] == one[i % parts]);
        }
    }
}

template <typename T>
T rounded(float value) {
    return reference::Wide<T>::store(value);
}

// Sums round once a fold, and means, too.
template <typename T>
void half_types(DType dtype) {
    std::mt19937_64 random(3);
    std::normal_distribution<float> normal;
    for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
        Buffers<T> in(static_cast<std::size_t>(ranks), std::vector<T>(1100));
        for (auto& each : in) {
            for (T& element : each) element = rounded<T>(normal(random));
        }
        std::vector<T> sum(1100), mean(1100), scaled(1100);
        fold_ranks(Op::kSum, dtype, sum.data(), places(in), sum.size());
        fold_ranks(Op::kAvg, dtype, mean.data(), places(in), mean.size());
        dist_prims::scale(dtype, scaled.data(), in[0].data(), 0.1, scaled.size());
        for (std::size_t i = 0; i < sum.size(); ++i) {
            float total = reference::widen(in[0][i]);
            for (std::size_t rank = 1; rank < in.size(); ++rank) total += reference::widen(in[rank][i]);
            CHECK(sum[i].bits == rounded<T>(total).bits);
            CHECK(mean[i].bits == rounded<T>(total / static_cast<float>(ranks)).bits);
            CHECK(scaled[i].bits == rounded<T>(reference::widen(in[0][i]) * 0.1f).bits);
        }
    }
}

// The mean over `ranks` ranks that all hold `value`, added one by one (a ring) or in pairs (a tree).
template <typename T>
T mean_of(DType dtype, T value, int ranks, bool in_pairs) {
    struct Sum {
        T value;
        int terms;
    };
    std::vector<Sum> sums(static_cast<std::size_t>(ranks), Sum{value, 1});
    while (sums.size() > 1) {
        std::vector<Sum> next;
        const std::size_t last = in_pairs ? sums.size() - 1 : 1;
        for (std::size_t at = 0; at < last; at += 2) {
            Sum& into = next.emplace_back(Sum{{}, sums[at].terms + sums[at + 1].terms});
            fold_terms(Op::kAvg, dtype, &into.value, {&sums[at].value, &sums[at + 1].value},
                       {sums[at].terms, sums[at + 1].terms}, ranks, 1);
        }
        next.insert(next.end(), sums.begin() + static_cast<std::ptrdiff_t>(2 * next.size()), sums.end());
        sums = std::move(next);
    }
    return sums[0].value;
}

// However a mean is made, that of the largest numbers of the type is finite. As no step can give more for less, so is
// the mean of any finite numbers. Where no partial sum is rounded, that of equal numbers is that number, were it the
// least one above zero.
template <typename T>
void means_in_many_steps(DType dtype, std::uint16_t largest, std::uint16_t infinity) {
    for (int ranks = 1; ranks <= 300; ++ranks) {
        for (const bool in_pairs : {false, true}) {
            CHECK(mean_of(dtype, T{largest}, ranks, in_pairs).bits <= largest);
            for (const std::uint16_t bits : {infinity, std::uint16_t{0}, std::uint16_t{0x8000}})
                CHECK(mean_of(dtype, T{bits}, ranks, in_pairs).bits == bits);
        }
    }
    for (int ranks = 1; ranks <= 256; ranks *= 2) {
        for (const std::uint16_t bits : {largest, std::uint16_t{1}})
            CHECK(mean_of(dtype, T{bits}, ranks, true).bits == bits);
    }
}

// Several sums are made in between: the bits are those of SUM, divided within the last step.
template <typename T>
void means_are_divided_sums(DType dtype) {
    std::mt19937_64 random(4);
    std::normal_distribution<float> normal;
    for (int number = 0; number < 2000; ++number) {
        T in[7], sums[4], partial[2], mean, total;
        for (T& each : in) each = rounded<T>(normal(random));
        const auto step = [&](Op op, T* out, const std::vector<const void*>& from, const std::vector<int>& terms) {
            fold_terms(op, dtype, out, from, terms, 7, 1);
        };
        step(Op::kSum, &sums[0], {&in[0], &in[1], &in[2]}, {});
        step(Op::kSum, &sums[1], {&in[3], &in[4]}, {});
        step(Op::kSum, &sums[1], {&sums[1], &sums[0]}, {});
        step(Op::kAvg, &partial[0], {&in[0], &in[1], &in[2]}, {});
        step(Op::kAvg, &partial[1], {&in[3], &in[4]}, {});
        CHECK(reference::widen(partial[0]) == reference::widen(sums[0]) / 4);
        step(Op::kAvg, &partial[1], {&partial[1], &partial[0]}, {2, 3});
        CHECK(reference::widen(partial[1]) == reference::widen(sums[1]) / 8);
        step(Op::kAvg, &mean, {&partial[1], &in[5], &in[6]}, {5, 1, 1});
        const float wide = reference::widen(sums[1]) + reference::widen(in[5]) + reference::widen(in[6]);
        CHECK(mean.bits == rounded<T>(wide / 7).bits);
        step(Op::kSum, &total, {&sums[1], &in[5], &in[6]}, {});
        CHECK(total.bits == rounded<T>(wide).bits);
    }
}

#if DIST_PRIMS_X86
template <typename T>
bool same(const std::vector<T>& one, const std::vector<T>& other) {
    return std::memcmp(one.data(), other.data(), one.size() * sizeof(T)) == 0;
}

// Any bits of numbers, infinities and numbers below the normal range, but no NaN: which NaN results is unspecified.
CASE(the_same_on_every_instruction_set) {
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    std::mt19937_64 random(5);
    for (int dtype = 0; dtype <= static_cast<int>(DType::kBool); ++dtype) {
        const auto type = static_cast<DType>(dtype);
        const std::size_t element = size_of(type), count = 777;
        Buffers<std::uint8_t> in = random_bits<std::uint8_t>(5, count * element, random);
        const bool is_half = type == DType::kFloat16 || type == DType::kBFloat16;
        for (auto& each : in) {  // no exponent of all ones
            const std::size_t part = type >= DType::kComplex64 ? element / 2 : element;
            for (std::size_t i = part - 1; type >= DType::kFloat16 && type < DType::kBool && i < each.size(); i += part)
                each[i] &= is_half ? 0xBB : 0xBF;
        }
        const float scales[] = {0.5f, 0.25f, 0.125f, 0.25f, 0.125f};
        const auto run = [&](const auto& fold, const auto& mean, const auto& scale, const auto& multiply) {
            std::vector<std::uint8_t> all, out(count * element);
            const auto keep = [&] { all.insert(all.end(), out.begin(), out.end()); };
            for (int op = 0; op < static_cast<int>(Op::kNone); ++op) {
                for (int inputs = 2; inputs <= 5; ++inputs) {
                    if (!reduces(static_cast<Op>(op), type, nullptr) || static_cast<Op>(op) == Op::kAvg) continue;
                    fold(static_cast<Op>(op), type, out.data(), places(in).data(), inputs, count);
                    keep();
                }
            }
            if (is_half) mean(type, out.data(), places(in).data(), scales, 5, 0.625f, count), keep();
            scale(type, out.data(), in[0].data(), 0.3, count), keep();
            multiply(type, out.data(), in[0].data(), 12345678901234567u, count), keep();
            return all;
        };
        const auto plain = run(generic::fold, generic::mean, generic::scale, generic::multiply);
        if (has_avx2) CHECK(same(plain, run(avx2::fold, avx2::mean, avx2::scale, avx2::multiply)));
        if (std::strcmp(instruction_set(), "avx512") == 0)
            CHECK(same(plain, run(avx512::fold, avx512::mean, avx512::scale, avx512::multiply)));
    }
}
#endif

CASE(reductions_of_whole_numbers) {
    whole_numbers<std::uint8_t>(DType::kUInt8);
    whole_numbers<std::int8_t>(DType::kInt8);
    whole_numbers<std::uint16_t>(DType::kUInt16);
    whole_numbers<std::int16_t>(DType::kInt16);
    whole_numbers<std::uint32_t>(DType::kUInt32);
    whole_numbers<std::int32_t>(DType::kInt32);
    whole_numbers<std::uint64_t>(DType::kUInt64);
    whole_numbers<std::int64_t>(DType::kInt64);
}

CASE(reductions_of_real_and_complex_numbers) {
    real_numbers<float>(DType::kFloat32, 1);
    real_numbers<double>(DType::kFloat64, 1);
    real_numbers<float>(DType::kComplex64, 2);
    real_numbers<double>(DType::kComplex128, 2);
}

CASE(reductions_of_half_types) {
    half_types<reference::Half>(DType::kFloat16);
    half_types<reference::BFloat16>(DType::kBFloat16);
}

CASE(means_of_half_types) {
    means_in_many_steps<reference::Half>(DType::kFloat16, 0x7BFF, 0x7C00);
    means_in_many_steps<reference::BFloat16>(DType::kBFloat16, 0x7F7F, 0x7F80);
    means_are_divided_sums<reference::Half>(DType::kFloat16);
    means_are_divided_sums<reference::BFloat16>(DType::kBFloat16);
}

}  // namespace
