#include "types.h"

#include <array>
#include <utility>

#include "../common/kernels.h"
#include "mpi_state.h"

namespace dist_prims::mpi {
namespace {

constexpr std::size_t kOps = static_cast<std::size_t>(Op::kNone);

template <DType dtype, std::size_t op>
void fold_two(void* in, void* in_and_out, int* count, MPI_Datatype*) {
    const void* both[] = {in, in_and_out};
    fold(static_cast<Op>(op), dtype, in_and_out, both, 2, static_cast<std::size_t>(*count));
}

using Ops = std::array<MPI_Op, kOps>;

template <DType dtype, std::size_t... ops>
Ops make_ops(std::index_sequence<ops...>) {
    Ops made;
    (check(MPI_Op_create(fold_two<dtype, ops>, 1, &made[ops]), "MPI_Op_create"), ...);
    return made;
}

// One for each reduction; they live as long as MPI.
template <DType dtype>
MPI_Op ours(Op op) {
    static const Ops made = make_ops<dtype>(std::make_index_sequence<kOps>());
    return made[static_cast<std::size_t>(op)];
}

MPI_Op theirs(Op op) {
    switch (op) {
        case Op::kSum:
        case Op::kAvg:
        case Op::kPremulSum:
            return MPI_SUM;
        case Op::kProduct:
            return MPI_PROD;
        case Op::kMin:
            return MPI_MIN;
        case Op::kMax:
            return MPI_MAX;
        case Op::kBitAnd:
            return MPI_BAND;
        case Op::kBitOr:
            return MPI_BOR;
        case Op::kBitXor:
            return MPI_BXOR;
        default:
            return MPI_OP_NULL;
    }
}

}  // namespace

Reduction reduction(Op op, DType dtype) {
    switch (dtype) {
        case DType::kUInt8:
            return {MPI_UINT8_T, theirs(op)};
        case DType::kInt8:
            return {MPI_INT8_T, theirs(op)};
        case DType::kUInt16:
            return {MPI_UINT16_T, theirs(op)};
        case DType::kInt16:
            return {MPI_INT16_T, theirs(op)};
        case DType::kUInt32:
            return {MPI_UINT32_T, theirs(op)};
        case DType::kInt32:
            return {MPI_INT32_T, theirs(op)};
        case DType::kUInt64:
            return {MPI_UINT64_T, theirs(op)};
        case DType::kInt64:
            return {MPI_INT64_T, theirs(op)};
        case DType::kFloat32:
            return {MPI_FLOAT, theirs(op)};
        case DType::kFloat64:
            return {MPI_DOUBLE, theirs(op)};
        case DType::kComplex64:
            return {MPI_C_FLOAT_COMPLEX, theirs(op)};
        case DType::kComplex128:
            return {MPI_C_DOUBLE_COMPLEX, theirs(op)};
        case DType::kFloat16:
            return {MPI_UINT16_T, ours<DType::kFloat16>(op)};
        case DType::kBFloat16:
            return {MPI_UINT16_T, ours<DType::kBFloat16>(op)};
        case DType::kBool:
            return {MPI_UINT8_T, ours<DType::kBool>(op)};
        default:
            throw Error(std::string("no reduction of ") + name_of(dtype));
    }
}

}  // namespace dist_prims::mpi
