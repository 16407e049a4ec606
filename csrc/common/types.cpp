#include "types.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string_view>

#include "checksum.h"

namespace dist_prims {
namespace {

struct TypeFacts {
    std::array<char, 48> name;
    std::size_t size;
};

constexpr std::array<TypeFacts, 15> kTypes{{
    {{"uint8"}, 1},
    {{"int8"}, 1},
    {{"uint16"}, 2},
    {{"int16"}, 2},
    {{"uint32"}, 4},
    {{"int32"}, 4},
    {{"uint64"}, 8},
    {{"int64"}, 8},
    {{"float16"}, 2},
    {{"bfloat16"}, 2},
    {{"float32"}, 4},
    {{"float64"}, 8},
    {{"complex64"}, 8},
    {{"complex128"}, 16},
    {{"bool"}, 1},
}};

// By DType. A rank with a newer torch may have a type that this rank does not know: its name is a placeholder.
std::array<TypeFacts, 256>& all_types() {
    static auto types = [] {
        std::array<TypeFacts, 256> facts;
        facts.fill({{"dtype of a newer torch"}, 1});
        std::copy(kTypes.begin(), kTypes.end(), facts.begin());
        return facts;
    }();
    return types;
}
constexpr std::array kOps{"SUM", "AVG", "PREMUL_SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", ""};
constexpr std::array kCollectives{"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
                                  "gather",     "scatter",        "all_to_all", "barrier"};

template <typename Enum>
std::size_t at(Enum value) {
    return static_cast<std::size_t>(value);
}

}  // namespace

std::size_t size_of(DType dtype) {
    return all_types()[at(dtype)].size;
}
const char* name_of(DType dtype) {
    return all_types()[at(dtype)].name.data();
}
void name_dtype(DType dtype, const std::string& name, std::size_t size) {
    TypeFacts& type = all_types()[at(dtype)];
    type = {{}, size};
    name.copy(type.name.data(), type.name.size() - 1);
}
const char* name_of(Op op) {
    return kOps[at(op)];
}
const char* name_of(Collective collective) {
    return kCollectives[at(collective)];
}
Collective collective_of(const std::string& name) {
    const auto entry = std::find(kCollectives.begin(), kCollectives.end(), name);
    if (entry == kCollectives.end()) throw std::invalid_argument(name + " is not a collective of the backend");
    return static_cast<Collective>(entry - kCollectives.begin());
}

bool reduces(Op op, DType dtype, std::string* reason) {
    const bool is_complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
    const bool has_fractions = is_complex || (dtype >= DType::kFloat16 && dtype <= DType::kFloat64);
    const char* why = nullptr;
    if (dtype >= DType::kWithoutKernel)
        why = std::string_view(name_of(dtype)).starts_with("complex")
                  ? "this dtype can be copied, not reduced; convert to complex64"
                  : "this dtype can be copied, not reduced; convert to bfloat16";
    else if ((op == Op::kAvg || op == Op::kPremulSum) && dtype == DType::kBool)
        why = "bool has no mean and no scale; convert to a number";
    else if ((op == Op::kMin || op == Op::kMax) && is_complex)
        why = "complex numbers have no order; use SUM or PRODUCT";
    else if (op >= Op::kBitAnd && has_fractions)
        why = "operations on bits need an integer or bool";
    if (why && reason) *reason = std::string(name_of(op)) + " cannot reduce " + name_of(dtype) + ": " + why;
    return why == nullptr;
}

void Call::set_algorithm(const std::string& name) {
    algorithm.fill(0);
    std::copy_n(name.begin(), std::min(name.size(), algorithm.size() - 1), algorithm.begin());
}

// `longest` and `tensor_ref` may differ between ranks.
bool Call::agrees_with(const Call& other) const {
    return sequence == other.sequence && count == other.count && layout == other.layout && root == other.root &&
           collective == other.collective && dtype == other.dtype && op == other.op && algorithm == other.algorithm;
}

std::uint64_t Call::checksum() const {
    std::array<std::uint64_t, sizeof(algorithm) / sizeof(std::uint64_t)> name;
    std::memcpy(name.data(), algorithm.data(), sizeof(algorithm));
    Checksum sum;
    sum.add(sequence).add(count).add(layout).add(static_cast<std::uint64_t>(root));
    sum.add(static_cast<std::uint64_t>(collective)).add(static_cast<std::uint64_t>(dtype));
    sum.add(static_cast<std::uint64_t>(op));
    for (const std::uint64_t word : name) sum.add(word);
    return sum.value();
}

std::string Call::text() const {
    std::string words = std::string(name_of(collective)) + "(";
    if (op != Op::kNone) words += std::string(name_of(op)) + ", ";
    if (collective != Collective::kBarrier)
        words += std::string(name_of(dtype)) + ", " + std::to_string(count) + " elements";
    if (root >= 0) words += ", root " + std::to_string(root);
    if (algorithm[0]) words += (words.back() == '(' ? "by " : ", by ") + std::string(algorithm.data());
    return words + ") as call number " + std::to_string(sequence);
}

}  // namespace dist_prims
