#include "tensors.h"

namespace dist_prims {

DType type_of(const at::Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case at::kByte:
            return DType::kUInt8;
        case at::kChar:
            return DType::kInt8;
        case at::kUInt16:
            return DType::kUInt16;
        case at::kShort:
            return DType::kInt16;
        case at::kUInt32:
            return DType::kUInt32;
        case at::kInt:
            return DType::kInt32;
        case at::kUInt64:
            return DType::kUInt64;
        case at::kLong:
            return DType::kInt64;
        case at::kHalf:
            return DType::kFloat16;
        case at::kBFloat16:
            return DType::kBFloat16;
        case at::kFloat:
            return DType::kFloat32;
        case at::kDouble:
            return DType::kFloat64;
        case at::kComplexFloat:
            return DType::kComplex64;
        case at::kComplexDouble:
            return DType::kComplex128;
        case at::kBool:
            return DType::kBool;
        default:
            break;
    }
    switch (tensor.element_size()) {
        case 1:
            return DType::kBytes1;
        case 2:
            return DType::kBytes2;
        case 4:
            return DType::kBytes4;
        case 8:
            return DType::kBytes8;
        default:
            return DType::kBytes16;
    }
}

Op op_of(const c10d::ReduceOp& op) {
    switch (op.op_) {
        case c10d::ReduceOp::SUM:
        case c10d::ReduceOp::PREMUL_SUM:
            return Op::kSum;
        case c10d::ReduceOp::AVG:
            return Op::kAvg;
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

at::Tensor packed(const at::Tensor& tensor) {
    if (!tensor.is_conj() && !tensor.is_neg() && tensor.is_contiguous()) return tensor;
    return tensor.resolve_conj().resolve_neg().contiguous();
}

std::uint64_t checksum(const std::vector<at::Tensor>& tensors) {
    std::uint64_t sum = 0xcbf29ce484222325u;  // FNV-1a over the lengths
    for (const auto& tensor : tensors) sum = (sum ^ static_cast<std::uint64_t>(tensor.numel())) * 0x100000001b3u;
    return sum;
}

Counts lengths(const Tensors& tensors) {
    Counts found;
    for (const auto& tensor : tensors) found.push_back(static_cast<std::size_t>(tensor.nbytes()));
    return found;
}

Counts elements(const Tensors& tensors) {
    Counts found;
    for (const auto& tensor : tensors) found.push_back(static_cast<std::size_t>(tensor.numel()));
    return found;
}

Blocks blocks_of(const Tensors& tensors) {
    Blocks found;
    for (const auto& tensor : tensors) found.push_back(bytes_of(tensor));
    return found;
}

Call call_of(Collective collective, const at::Tensor& like, std::size_t count) {
    Call call;
    call.collective = collective;
    call.dtype = type_of(like);
    call.count = count;
    return call;
}

at::Tensor premultiplied(const at::Tensor& tensor, const c10d::ReduceOp& op) {
    if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return tensor;
    const auto* factor = dynamic_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
    TORCH_CHECK(factor, "PREMUL_SUM without its factor");
    return factor->tensor_factor.defined() ? tensor * factor->tensor_factor : tensor * factor->double_factor;
}

Op checked(const char* what, const c10d::ReduceOp& op, const at::Tensor& tensor) {
    std::string reason;
    TORCH_CHECK_VALUE(op_of(op) != Op::kNone, what, ": this reduction is not known");
    TORCH_CHECK_VALUE(reduces(op_of(op), type_of(tensor), &reason), what, ": ", reason);
    return op_of(op);
}

const at::Tensor& only(const char* what, const Tensors& tensors) {
    TORCH_CHECK_VALUE(tensors.size() == 1, what, ": one tensor is needed, not ", tensors.size());
    TORCH_CHECK_VALUE(tensors[0].device().is_cpu(), what, ": the tensor is on ", tensors[0].device(),
                      ", not on the CPU");
    return tensors[0];
}

void alike(const char* what, const Tensors& tensors, const at::Tensor& like) {
    for (const auto& tensor : tensors) {
        TORCH_CHECK_VALUE(tensor.scalar_type() == like.scalar_type() && tensor.device() == like.device(), what,
                          ": tensors differ: ", tensor.scalar_type(), " on ", tensor.device(), ", ", like.scalar_type(),
                          " on ", like.device());
    }
}

void as_many(const char* what, std::size_t found, int wanted) {
    TORCH_CHECK_VALUE(found == static_cast<std::size_t>(wanted), what, ": ", found, " tensors for a group of ", wanted,
                      " ranks");
}

at::Tensor lent_tensor(at::IntArrayRef shape, const at::TensorOptions& options) {
    const auto bytes = static_cast<std::size_t>(c10::multiply_integers(shape)) * options.dtype().itemsize();
    return at::from_blob(Lender::instance().allocate(bytes), shape, release_lent, options.device(c10::kCPU));
}

void release_lent(void* data) {
    Lender::instance().release(static_cast<std::byte*>(data));
}

}  // namespace dist_prims
