#include "tensor_arguments.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/TensorUtils.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/SmallVector.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>

#include "../../common/checksum.h"
#include "../../common/kernels.h"
#include "../../shm/shared_tensors.h"

namespace dist_prims {
namespace {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
using PreMulSumSupplement = c10d::NCCLPreMulSumSupplement;
#else
using c10d::PreMulSumSupplement;
#endif

// The factor of PREMUL_SUM: a number, or a tensor of any real type, unlike for NCCL.
at::Scalar factor_of(const char* what, const c10d::ReduceOp& op) {
    const auto* supplement = dynamic_cast<const PreMulSumSupplement*>(op.supplement_.get());
    TORCH_CHECK_VALUE(supplement, what,
                      ": PREMUL_SUM has no factor; use torch.distributed._make_nccl_premul_sum(factor)");
    const at::Tensor& tensor = supplement->tensor_factor;
    if (!tensor.defined()) return supplement->double_factor;
    TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.numel() == 1, what,
                      ": the factor of PREMUL_SUM is a tensor of ", tensor.numel(), " elements on ", tensor.device(),
                      "; give a number, or a dense tensor of one element on the CPU");
    TORCH_CHECK_VALUE(!tensor.is_complex() && tensor.scalar_type() != at::kBool, what,
                      ": the factor of PREMUL_SUM is of type ", tensor.scalar_type(), "; give a real number");
    return tensor.item();
}

std::string text_of(const at::Scalar& factor) {
    if (factor.isFloatingPoint()) return c10::str(factor.toDouble());
    return factor.type() == at::kUInt64 ? c10::str(factor.toUInt64()) : c10::str(factor.toLong());
}

// The bits of a factor as a number of an integer type; nullopt if the type cannot hold the factor.
std::optional<std::uint64_t> factor_bits(const at::Scalar& factor, at::ScalarType type) {
    // 1. The range of the type: -2^bits to 2^bits - 1, or 0 to 2^bits - 1.
    const bool is_signed = c10::isSignedType(type);
    const int bits = 8 * static_cast<int>(c10::elementSize(type)) - is_signed;
    const std::uint64_t largest = ~std::uint64_t{0} >> (64 - bits);
    // 2. A floating factor must be a whole number in the range.
    if (factor.isFloatingPoint()) {
        const double value = factor.toDouble(), end = std::ldexp(1, bits);
        if (value != std::trunc(value) || value >= end || value < (is_signed ? -end : 0)) return std::nullopt;
        return value < 0 ? static_cast<std::uint64_t>(static_cast<int64_t>(value)) : static_cast<std::uint64_t>(value);
    }
    // 3. An integer factor: ~value is -factor - 1 if the factor is negative.
    const bool is_negative = factor.type() != at::kUInt64 && factor.toLong() < 0;
    const std::uint64_t value = is_negative ? static_cast<std::uint64_t>(factor.toLong()) : factor.toUInt64();
    if (is_negative ? !is_signed || ~value > largest : value > largest) return std::nullopt;
    return value;
}

constexpr auto kScalarTypes = static_cast<std::size_t>(at::ScalarType::NumOptions);

// The DType of a type of torch that has no kernel: the numbers from kWithoutKernel on.
constexpr DType without_kernel(std::size_t scalar_type) {
    constexpr auto kFirst = static_cast<std::size_t>(DType::kWithoutKernel);
    static_assert(kFirst + kScalarTypes <= 256, "a DType has 8 bits");
    return static_cast<DType>(kFirst + scalar_type);
}

// kNone if this library does not know the reduction.
Op op_of(const c10d::ReduceOp& op) {
    switch (op.op_) {
        case c10d::ReduceOp::SUM:
            return Op::kSum;
        case c10d::ReduceOp::AVG:
            return Op::kAvg;
        case c10d::ReduceOp::PREMUL_SUM:
            return Op::kPremulSum;
        case c10d::ReduceOp::PRODUCT:
            return Op::kProduct;
        case c10d::ReduceOp::MIN:
            return Op::kMin;
        case c10d::ReduceOp::MAX:
            return Op::kMax;
        case c10d::ReduceOp::BAND:
            return Op::kBitAnd;
        case c10d::ReduceOp::BOR:
            return Op::kBitOr;
        case c10d::ReduceOp::BXOR:
            return Op::kBitXor;
        default:
            return Op::kNone;
    }
}

}  // namespace

void name_dtypes() {
    for (std::size_t number = 0; number < kScalarTypes; ++number) {
        const auto type = static_cast<at::ScalarType>(number);
        if (type == at::ScalarType::Undefined) continue;
        std::string name = c10::toString(type);
        std::transform(name.begin(), name.end(), name.begin(),
                       [](unsigned char letter) { return std::tolower(letter); });
        name_dtype(without_kernel(number), name, c10::elementSize(type));
    }
}

DType type_of(const at::Tensor& tensor) {
    static constexpr auto kTypes = [] {
        std::array<DType, kScalarTypes> types{};
        for (std::size_t type = 0; type < kScalarTypes; ++type) types[type] = without_kernel(type);
        const std::pair<at::ScalarType, DType> pairs[] = {{at::kByte, DType::kUInt8},
                                                          {at::kChar, DType::kInt8},
                                                          {at::kUInt16, DType::kUInt16},
                                                          {at::kShort, DType::kInt16},
                                                          {at::kUInt32, DType::kUInt32},
                                                          {at::kInt, DType::kInt32},
                                                          {at::kUInt64, DType::kUInt64},
                                                          {at::kLong, DType::kInt64},
                                                          {at::kHalf, DType::kFloat16},
                                                          {at::kBFloat16, DType::kBFloat16},
                                                          {at::kFloat, DType::kFloat32},
                                                          {at::kDouble, DType::kFloat64},
                                                          {at::kComplexFloat, DType::kComplex64},
                                                          {at::kComplexDouble, DType::kComplex128},
                                                          {at::kBool, DType::kBool}};
        for (const auto& [scalar_type, type] : pairs) types[static_cast<std::size_t>(scalar_type)] = type;
        return types;
    }();
    return kTypes[static_cast<std::size_t>(tensor.scalar_type())];
}

bool is_packed(const at::Tensor& tensor) {
    return tensor.is_cpu() && !tensor.is_conj() && !tensor.is_neg() && tensor.is_contiguous();
}

at::Tensor packed(const at::Tensor& tensor) {
    return is_packed(tensor) ? tensor : tensor.cpu().resolve_conj().resolve_neg().contiguous();
}

at::Tensor packed_buffer(const at::Tensor& tensor) {
    return at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
}

void copy_result(const at::Tensor& tensor, const at::Tensor& received) {
    const c10::InferenceMode mode(tensor.is_inference() || c10::InferenceMode::is_enabled());
    tensor.copy_(received);
}

bool outputs_overlap(const Tensors& inputs, const Tensors& outputs) {
    // 1. The ranges of memory, without the input of a block whose output has the same memory.
    struct Range {
        const std::byte *begin = nullptr, *end = nullptr;
        bool is_output = false;
    };
    c10::SmallVector<Range, 16> ranges;  // no allocation for small groups
    const auto range_of = [](const Tensors& tensors, std::size_t block, bool is_output) {
        if (block >= tensors.size() || !tensors[block].defined() || !is_packed(tensors[block])) return Range{};
        const auto* begin = static_cast<const std::byte*>(tensors[block].const_data_ptr());
        return Range{begin, begin + tensors[block].nbytes(), is_output};
    };
    for (std::size_t block = 0; block < std::max(inputs.size(), outputs.size()); ++block) {
        const Range input = range_of(inputs, block, false), output = range_of(outputs, block, true);
        const bool is_in_place = input.begin == output.begin && input.end == output.end;
        if (!is_in_place && input.begin != input.end) ranges.push_back(input);
        if (output.begin != output.end) ranges.push_back(output);
    }
    // 2. In the order of their beginnings, a range overlaps an earlier one if it begins before the end of that range.
    // Two inputs may overlap.
    const auto is_earlier = [](const Range& first, const Range& second) { return first.begin < second.begin; };
    if (!std::is_sorted(ranges.begin(), ranges.end(), is_earlier)) std::sort(ranges.begin(), ranges.end(), is_earlier);
    const std::byte *end = nullptr, *end_of_outputs = nullptr;  // of the ranges so far
    for (const Range& range : ranges) {
        if (range.begin < (range.is_output ? end : end_of_outputs)) return true;
        end = std::max(end, range.end);
        if (range.is_output) end_of_outputs = std::max(end_of_outputs, range.end);
    }
    return false;
}

std::uint64_t checksum_of(const Counts& lengths) {
    Checksum sum;
    for (const std::size_t length : lengths) sum.add(length);
    return sum.value();
}

Counts byte_counts(const Tensors& tensors) {
    Counts counts;
    for (const auto& tensor : tensors) counts.push_back(static_cast<std::size_t>(tensor.nbytes()));
    return counts;
}

Counts element_counts(const Tensors& tensors) {
    Counts counts;
    for (const auto& tensor : tensors) counts.push_back(static_cast<std::size_t>(tensor.numel()));
    return counts;
}

Blocks blocks_of(const Tensors& tensors) {
    Blocks addresses;
    for (const auto& tensor : tensors) addresses.push_back(address_of(tensor));
    return addresses;
}

Places places_of(const Tensors& tensors) {
    Places addresses;
    for (const auto& tensor : tensors) addresses.push_back(address_of(tensor));
    return addresses;
}

Call announced_call(Collective collective, const at::Tensor& like, std::size_t count) {
    Call call;
    call.collective = collective;
    call.dtype = type_of(like);
    call.count = count;
    return call;
}

at::Tensor premultiplied(const char* what, const at::Tensor& tensor, const c10d::ReduceOp& op) {
    if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return tensor;
    const at::Scalar factor = factor_of(what, op);
    const at::Tensor input = packed(tensor);
    const at::Tensor product = at::empty(input.sizes(), input.options());
    const auto count = static_cast<std::size_t>(input.numel());
    if (at::isIntegralType(input.scalar_type(), false)) {
        const auto bits = factor_bits(factor, input.scalar_type());
        TORCH_CHECK_VALUE(bits, what, ": PREMUL_SUM cannot multiply ", name_of(type_of(input)), " by ", text_of(factor),
                          ", which that type does not hold; convert the tensor to a floating type first");
        multiply(type_of(input), bytes_of(product), bytes_of(input), *bits, count);
    } else {
        scale(type_of(input), bytes_of(product), bytes_of(input), factor.toDouble(), count);
    }
    return product;
}

Tensors split_into_blocks(const char* what, const at::Tensor& tensor, int size, const std::vector<int64_t>& splits) {
    const auto blocks = static_cast<std::size_t>(size);
    const int64_t rows = tensor.dim() ? tensor.size(0) : 1;
    const at::AutoDispatchBelowADInplaceOrView no_autograd;  // the blocks are read and written as memory
    if (splits.empty()) {
        TORCH_CHECK_VALUE(tensor.numel() % size == 0, what, ": ", tensor.numel(),
                          " elements cannot be shared evenly by ", size, " ranks");
        const bool splits_rows = !tensor.is_contiguous() && rows % size == 0;  // view(-1) may not exist
        if (splits_rows) return tensor.split_with_sizes(std::vector<int64_t>(blocks, rows / size));
        const at::DimVector flat{tensor.numel()};
        TORCH_CHECK_VALUE(at::detail::computeStride(tensor.sizes(), tensor.strides(), flat), what,
                          ": the output of shape ", tensor.sizes(), " with strides ", tensor.strides(),
                          " has no blocks for ", size,
                          " ranks that are views of it; give a contiguous output, and copy it afterwards");
        return tensor.view(-1).split_with_sizes(std::vector<int64_t>(blocks, tensor.numel() / size));
    }
    const bool is_whole = std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows;
    const bool is_negative = std::any_of(splits.begin(), splits.end(), [](int64_t length) { return length < 0; });
    TORCH_CHECK_VALUE(splits.size() == blocks && is_whole && !is_negative && tensor.dim() > 0, what,
                      ": the split sizes ", at::IntArrayRef(splits), " do not fit a tensor of shape ", tensor.sizes(),
                      "; give ", size, " sizes, one for each rank, none negative, that add up to its first dimension");
    return tensor.split_with_sizes(splits);
}

Op checked_op(const char* what, const c10d::ReduceOp& op, const at::Tensor& tensor) {
    std::string reason;
    TORCH_CHECK_VALUE(op_of(op) != Op::kNone, what, ": this reduction is not known");
    TORCH_CHECK_VALUE(reduces(op_of(op), type_of(tensor), &reason), what, ": ", reason);
    return op_of(op);
}

const at::Tensor& only_tensor(const char* what, const Tensors& tensors) {
    TORCH_CHECK_VALUE(tensors.size() == 1, what, ": one tensor is needed, not ", tensors.size());
    return tensors[0];
}

void must_be_on_cpu(const char* what, const at::Tensor& tensor) {
    TORCH_CHECK_VALUE(tensor.is_cpu(), what, ": the tensor is on ", tensor.device(), ", not on the CPU");
}

void must_be_alike(const char* what, const Tensors& tensors, const at::Tensor& like) {
    for (const auto& tensor : tensors) {
        TORCH_CHECK_VALUE(tensor.scalar_type() == like.scalar_type() && tensor.device() == like.device(), what,
                          ": tensors differ: ", tensor.scalar_type(), " on ", tensor.device(), ", ", like.scalar_type(),
                          " on ", like.device());
    }
}

void must_be_distinct(const char* what, const at::Tensor& tensor) {
    TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, what,
                      ": several elements of the tensor lie in one place, as in an expanded tensor, so nothing "
                      "can be received into it; receive into a clone() of it");
}

void must_be_one_per_rank(const char* what, std::size_t tensors, int size) {
    TORCH_CHECK_VALUE(tensors == static_cast<std::size_t>(size), what, ": ", tensors, " tensors for a group of ", size,
                      " ranks");
}

c10::DataPtr SharedTensorAllocator::allocate(std::size_t bytes) {
    Exporter& exporter = Exporter::instance();
    const auto release = [&exporter](void* data) { exporter.release(static_cast<std::byte*>(data)); };
    return c10::InefficientStdFunctionContext::makeDataPtr(exporter.allocate(bytes), release, c10::Device(c10::kCPU));
}

void SharedTensorAllocator::copy_data(void* to, const void* from, std::size_t bytes) const {
    std::memcpy(to, from, bytes);
}

std::shared_ptr<c10::Allocator> shared_tensor_allocator() {
    static const auto one = std::make_shared<SharedTensorAllocator>();
    return one;
}

at::Tensor shared_tensor(at::IntArrayRef shape, at::ScalarType dtype) {
    constexpr c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);
    return at::detail::empty_generic(shape, shared_tensor_allocator().get(), kCpu, dtype, std::nullopt);
}

}  // namespace dist_prims
