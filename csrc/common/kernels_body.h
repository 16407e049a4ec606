// The loops of kernels.h: plain loops, which the compiler turns into vector instructions. Each kernels_<set>.cpp
// includes this file once, in a namespace of its own; so the file has neither an include guard nor includes:
// kernels_sets.h has them.

struct Half {
    std::uint16_t bits;
};
struct BFloat16 {
    std::uint16_t bits;
};
struct Flag {  // an element of a bool tensor: any byte but 0 is true, whereas a bool of C++ is 0 or 1
    std::uint8_t byte;
};

// float16 to float32, and back with rounding to the nearest even number, without branches, as the compiler needs it for
// vector instructions. From the left, float16 has a sign, 5 bits of exponent and 10 of fraction; float32 has a sign, 8
// and 23. An exponent e is stored as e + 15 in float16, as e + 127 in float32. A float16 whose exponent field is 0 is
// subnormal: fraction * 2^-24. `two_w` is the number without its sign, its exponent in the highest bits.
inline float widen(Half h) {
    const std::uint32_t w = std::uint32_t{h.bits} << 16, sign = w & 0x80000000u, two_w = w + w;
    // 1. Normal: the exponent field must grow by 127 - 15 = 112. To add 0xE0 = 224 instead, and to multiply by 2^-112,
    //    makes field 31 (infinity and NaN) the field 255 of float32, which the product keeps.
    const float normal = std::bit_cast<float>((two_w >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
    // 2. Subnormal: with the exponent field 126 the fraction is 0.5 + fraction * 2^-24.
    const float subnormal = std::bit_cast<float>((two_w >> 17) | (126u << 23)) - 0.5f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(two_w < (1u << 27) ? subnormal : normal));
}

inline Half narrow_half(float f) {
    const std::uint32_t w = std::bit_cast<std::uint32_t>(f), sign = w & 0x80000000u, two_w = w + w;
    // 1. E, the exponent of f, but at least -14 (field 113 = 0x71), the exponent of the last bits of a subnormal.
    std::uint32_t exponent = two_w & 0xFF000000u;
    exponent = exponent < 0x71000000u ? 0x71000000u : exponent;
    // 2. 4 |f|. The first product is infinite from |f| = 2^16 on, which is infinite in float16.
    float base = (std::bit_cast<float>(w & 0x7FFFFFFFu) * 0x1.0p+112f) * 0x1.0p-110f;
    // 3. Add 2^(E + 15). The last bit of the sum is 2^(E - 8), so the addition rounds |f| to a multiple of 2^(E - 10),
    //    as float16 does. The low bits of the sum are that multiple: 1024 + fraction, or fraction if f is subnormal.
    base = std::bit_cast<float>((exponent >> 1) + (15u << 23)) + base;
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(base);
    // 4. The exponent field of the sum is E + 15 + 127, its low 5 bits are E + 14. The 1024 of a normal number adds 1.
    const std::uint32_t finite = ((bits >> 13) & 0x7C00u) + (bits & 0xFFFu);
    return {static_cast<std::uint16_t>((sign >> 16) | (two_w > 0xFF000000u ? 0x7E00u : finite))};  // 0x7E00: NaN
}

// bfloat16 is the upper half of a float32.
inline float widen(BFloat16 b) {
    return std::bit_cast<float>(std::uint32_t{b.bits} << 16);
}

inline BFloat16 narrow_bfloat16(float f) {
    const std::uint32_t w = std::bit_cast<std::uint32_t>(f);
    const std::uint32_t rounded = (w + 0x7FFFu + ((w >> 16) & 1u)) >> 16;  // a half goes to the even number
    return {static_cast<std::uint16_t>((w & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded)};
}

// How a stored element is computed with: half types as float32, Flag as bool, the others as they are.
template <typename T>
struct Wide {
    using type = T;
    static T load(T x) { return x; }
    static T store(T x) { return x; }
};
template <>
struct Wide<Half> {
    using type = float;
    static float load(Half x) { return widen(x); }
    static Half store(float x) { return narrow_half(x); }
};
template <>
struct Wide<BFloat16> {
    using type = float;
    static float load(BFloat16 x) { return widen(x); }
    static BFloat16 store(float x) { return narrow_bfloat16(x); }
};
template <>
struct Wide<Flag> {
    using type = bool;
    static bool load(Flag x) { return x.byte != 0; }
    static Flag store(bool x) { return {x}; }
};
template <typename T>
struct Complex {
    T re, im;
};

// A product that is rounded before it is added. GCC 12 turns the loop of a complex product into vfmaddsub, which
// rounds once, although -ffp-contract=off forbids that; other processors then give other bits.
template <typename T>
T rounded(T product) {
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
    return __builtin_assoc_barrier(product);
#else
    return product;
#endif
}

// The operations. kWraps: integers are computed as unsigned integers, because overflow of signed integers is undefined.
struct Sum {
    static constexpr bool kWraps = true;
    template <typename T>
    static T apply(T a, T b) {
        return static_cast<T>(a + b);
    }
    static bool apply(bool a, bool b) { return a || b; }
};
struct Product {
    static constexpr bool kWraps = true;
    template <typename T>
    static T apply(T a, T b) {
        return static_cast<T>(a * b);
    }
    static std::uint16_t apply(std::uint16_t a, std::uint16_t b) { return static_cast<std::uint16_t>(1u * a * b); }
    static bool apply(bool a, bool b) { return a && b; }
    template <typename T>
    static Complex<T> apply(Complex<T> a, Complex<T> b) {
        return {rounded(a.re * b.re) - rounded(a.im * b.im), rounded(a.re * b.im) + rounded(a.im * b.re)};
    }
};
template <typename Precedes>
struct Extreme {  // if an input is not a number (NaN), the result is NaN
    static constexpr bool kWraps = false;
    template <typename T>
    static T apply(T a, T b) {
        return a != a ? a : (Precedes()(b, a) || b != b) ? b : a;
    }
};
using Min = Extreme<std::less<>>;
using Max = Extreme<std::greater<>>;
template <typename Operator>
struct Bitwise {
    static constexpr bool kWraps = true;
    template <typename T>
    static T apply(T a, T b) {
        return static_cast<T>(Operator()(a, b));
    }
};
using BitAnd = Bitwise<std::bit_and<>>;
using BitOr = Bitwise<std::bit_or<>>;
using BitXor = Bitwise<std::bit_xor<>>;

// Folds 2 to 4 inputs in one loop.
template <typename F, typename T, int N>
void fold_few(T* out, const T* const* in, std::size_t count) {
    using W = Wide<T>;
    const T *a = in[0], *b = in[1], *c = in[N > 2 ? 2 : 0], *d = in[N > 3 ? 3 : 0];
    for (std::size_t i = 0; i < count; ++i) {
        auto total = F::apply(W::load(a[i]), W::load(b[i]));
        if constexpr (N > 2) total = F::apply(total, W::load(c[i]));
        if constexpr (N > 3) total = F::apply(total, W::load(d[i]));
        out[i] = W::store(total);
    }
}

// Folds any number of inputs: for each block of elements, adds one input after the other to the totals of the block.
template <typename F, typename T>
void fold_many(T* out, const T* const* in, int inputs, std::size_t count) {
    using W = Wide<T>;
    constexpr std::size_t kBlock = 512;  // the totals of a block stay in the first-level cache
    typename W::type total[kBlock];
    for (std::size_t begin = 0; begin < count; begin += kBlock) {
        const std::size_t n = count - begin < kBlock ? count - begin : kBlock;
        for (std::size_t i = 0; i < n; ++i) total[i] = W::load(in[0][begin + i]);
        for (int k = 1; k < inputs; ++k) {
            const T* input = in[k] + begin;
            for (std::size_t i = 0; i < n; ++i) total[i] = F::apply(total[i], W::load(input[i]));
        }
        for (std::size_t i = 0; i < n; ++i) out[begin + i] = W::store(total[i]);
    }
}

// out = F of `inputs` arrays of `count` elements of the type T.
template <typename F, typename T>
void fold_as(void* out, const void* const* in, int inputs, std::size_t count) {
    auto* to = static_cast<T*>(out);
    auto* from = reinterpret_cast<const T* const*>(in);
    switch (inputs) {
        case 1:
            if (out != in[0]) std::memcpy(out, in[0], count * sizeof(T));
            return;
        case 2:
            return fold_few<F, T, 2>(to, from, count);
        case 3:
            return fold_few<F, T, 3>(to, from, count);
        case 4:
            return fold_few<F, T, 4>(to, from, count);
        default:
            return fold_many<F, T>(to, from, inputs, count);
    }
}

// Passes the type of the elements of a dtype to a generic lambda.
template <typename T>
struct Type {
    DType dtype;
};

// Calls `run` with the one of `types` that has this dtype; does nothing if none has.
template <typename Run, typename... T>
void with_type_of(DType dtype, const Run& run, Type<T>... types) {
    static_cast<void>(((types.dtype == dtype && (run(types), true)) || ...));
}

template <typename Run>
void with_integer(DType dtype, const Run& run) {
    with_type_of(dtype, run, Type<std::uint8_t>{DType::kUInt8}, Type<std::int8_t>{DType::kInt8},
                 Type<std::uint16_t>{DType::kUInt16}, Type<std::int16_t>{DType::kInt16},
                 Type<std::uint32_t>{DType::kUInt32}, Type<std::int32_t>{DType::kInt32},
                 Type<std::uint64_t>{DType::kUInt64}, Type<std::int64_t>{DType::kInt64});
}

template <typename Run>
void with_real(DType dtype, const Run& run) {
    with_type_of(dtype, run, Type<Half>{DType::kFloat16}, Type<BFloat16>{DType::kBFloat16},
                 Type<float>{DType::kFloat32}, Type<double>{DType::kFloat64});
}

// For operations that act on both parts of a complex number alike: the dtype of the parts, and their number.
inline DType as_reals(DType dtype, std::size_t& count) {
    if (dtype != DType::kComplex64 && dtype != DType::kComplex128) return dtype;
    count *= 2;
    return dtype == DType::kComplex64 ? DType::kFloat32 : DType::kFloat64;
}

template <typename F, typename T>
using Whole = std::conditional_t<F::kWraps, std::make_unsigned_t<T>, T>;

template <typename F>
void fold_integers(DType dtype, void* out, const void* const* in, int inputs, std::size_t count) {
    if (dtype == DType::kBool) return fold_as<F, Flag>(out, in, inputs, count);
    with_integer(dtype, [&]<typename T>(Type<T>) { fold_as<F, Whole<F, T>>(out, in, inputs, count); });
}

template <typename F>
void fold_numbers(DType dtype, void* out, const void* const* in, int inputs, std::size_t count) {
    with_real(dtype, [&]<typename T>(Type<T>) { fold_as<F, T>(out, in, inputs, count); });
    fold_integers<F>(dtype, out, in, inputs, count);
}

// Entry point of kernels.h, like the other functions without template parameters below. Pairs of an operation and a
// dtype that have no case here never come: reduces() in types.cpp refuses them.
void fold(Op op, DType dtype, void* out, const void* const* in, int inputs, std::size_t count) {
    switch (op) {
        case Op::kSum:
        case Op::kPremulSum:
            dtype = as_reals(dtype, count);
            return fold_numbers<Sum>(dtype, out, in, inputs, count);
        case Op::kProduct:
            if (dtype == DType::kComplex64) return fold_as<Product, Complex<float>>(out, in, inputs, count);
            if (dtype == DType::kComplex128) return fold_as<Product, Complex<double>>(out, in, inputs, count);
            return fold_numbers<Product>(dtype, out, in, inputs, count);
        case Op::kMin:
            return fold_numbers<Min>(dtype, out, in, inputs, count);
        case Op::kMax:
            return fold_numbers<Max>(dtype, out, in, inputs, count);
        case Op::kBitAnd:
            return fold_integers<BitAnd>(dtype, out, in, inputs, count);
        case Op::kBitOr:
            return fold_integers<BitOr>(dtype, out, in, inputs, count);
        case Op::kBitXor:
            return fold_integers<BitXor>(dtype, out, in, inputs, count);
        case Op::kAvg:  // fold_terms() folds a mean
        case Op::kNone:
            return;
    }
}

// out = (in[0] * scales[0] + in[1] * scales[1] + ...) / divisor, for half types; computed in float32.
template <typename T>
void mean_as(void* out, const void* const* in, const float* scales, int inputs, float divisor, std::size_t count) {
    using W = Wide<T>;
    constexpr std::size_t kBlock = 512;
    float total[kBlock];
    for (std::size_t begin = 0; begin < count; begin += kBlock) {
        const std::size_t n = count - begin < kBlock ? count - begin : kBlock;
        for (int k = 0; k < inputs; ++k) {
            const T* input = static_cast<const T*>(in[k]) + begin;
            const float by = scales[k];
            if (k == 0)
                for (std::size_t i = 0; i < n; ++i) total[i] = W::load(input[i]) * by;
            else
                for (std::size_t i = 0; i < n; ++i) total[i] += W::load(input[i]) * by;
        }
        T* to = static_cast<T*>(out) + begin;
        if (divisor == 1)
            for (std::size_t i = 0; i < n; ++i) to[i] = W::store(total[i]);
        else
            for (std::size_t i = 0; i < n; ++i) to[i] = W::store(total[i] / divisor);
    }
}

void mean(DType dtype, void* out, const void* const* in, const float* scales, int inputs, float divisor,
          std::size_t count) {
    if (dtype == DType::kFloat16) return mean_as<Half>(out, in, scales, inputs, divisor, count);
    return mean_as<BFloat16>(out, in, scales, inputs, divisor, count);
}

template <typename T>
void divide_as(void* data, int divisor, std::size_t count) {
    using W = Wide<T>;
    auto* elements = static_cast<T*>(data);
    for (std::size_t i = 0; i < count; ++i)
        elements[i] = W::store(static_cast<typename W::type>(W::load(elements[i]) / divisor));
}

void divide(DType dtype, void* data, int divisor, std::size_t count) {
    dtype = as_reals(dtype, count);
    const auto run = [&]<typename T>(Type<T>) { divide_as<T>(data, divisor, count); };
    with_integer(dtype, run);
    with_real(dtype, run);
}

template <typename T>
void scale_as(void* out, const void* in, double factor, std::size_t count) {
    using W = Wide<T>;
    auto* to = static_cast<T*>(out);
    auto* from = static_cast<const T*>(in);
    const auto by = static_cast<typename W::type>(factor);
    for (std::size_t i = 0; i < count; ++i) to[i] = W::store(W::load(from[i]) * by);
}

void scale(DType dtype, void* out, const void* in, double factor, std::size_t count) {
    dtype = as_reals(dtype, count);
    with_real(dtype, [&]<typename T>(Type<T>) { scale_as<T>(out, in, factor, count); });
}

// The bits of a product are the same for signed and unsigned integers, so the unsigned type serves both.
template <typename T>
void multiply_as(void* out, const void* in, std::uint64_t factor, std::size_t count) {
    auto* to = static_cast<T*>(out);
    auto* from = static_cast<const T*>(in);
    const auto by = static_cast<T>(factor);
    for (std::size_t i = 0; i < count; ++i) to[i] = Product::apply(from[i], by);
}

void multiply(DType dtype, void* out, const void* in, std::uint64_t factor, std::size_t count) {
    with_integer(dtype, [&]<typename T>(Type<T>) { multiply_as<std::make_unsigned_t<T>>(out, in, factor, count); });
}
