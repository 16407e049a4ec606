// Conversions between torch's tensors and the bytes of csrc/shm and csrc/net.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "../../common/types.h"
#include "../../shm/collectives.h"

namespace dist_prims {

using Tensors = std::vector<at::Tensor>;

// Names the types of torch that have no kernel, in errors.
void name_dtypes();

// The DType of a tensor. Each type of torch has its own, also a type that can only be moved.
DType type_of(const at::Tensor& tensor);

Op op_of(const c10d::ReduceOp& op);

// Whether a tensor is contiguous, and its memory holds its values as they are.
bool is_packed(const at::Tensor& tensor);
// A packed tensor: the tensor itself or a copy.
at::Tensor packed(const at::Tensor& tensor);

inline std::byte* bytes_of(const at::Tensor& tensor) {
    return static_cast<std::byte*>(tensor.data_ptr());
}
inline std::byte* address_of(const at::Tensor& tensor) {
    return tensor.defined() ? bytes_of(tensor) : nullptr;
}

Counts byte_counts(const Tensors& tensors);  // in bytes
Counts element_counts(const Tensors& tensors);
// The address of each tensor, null for one that is undefined.
Blocks blocks_of(const Tensors& tensors);
Places places_of(const Tensors& tensors);

// An output: contiguous memory to write to, and deliver(), which copies it to the tensor if it is not the tensor's own.
struct Output {
    at::Tensor tensor, flat;

    explicit Output(const at::Tensor& tensor) : tensor(tensor), flat(packed(tensor)) {}
    std::byte* data() const { return bytes_of(flat); }
    void deliver() const {
        if (!flat.is_same(tensor)) tensor.copy_(flat);
    }
};

// Whether an output shares memory with another output, or with an input other than the input of its own block in the
// very same place. The lists are by block; a list may be empty, and tensors may be undefined. Tensors that are not
// packed are left out: they are copied anyway.
bool outputs_overlap(const Tensors& inputs, const Tensors& outputs);

Call announced_call(Collective collective, const at::Tensor& like, std::size_t count);

// The addend of PREMUL_SUM: the tensor times this rank's factor, in the tensor's type. Other reductions add the tensor
// itself.
at::Tensor premultiplied(const char* what, const at::Tensor& tensor, const c10d::ReduceOp& op);

// The blocks of a tensor: of equal sizes, or of the numbers of rows in `splits`.
Tensors split_into_blocks(const char* what, const at::Tensor& tensor, int size,
                          const std::vector<int64_t>& splits = {});

// The rest are checks, which throw ValueError; `what` is the operation. The reduction, if it is one for the tensor:
Op checked_op(const char* what, const c10d::ReduceOp& op, const at::Tensor& tensor);
// The only tensor, which must be on the CPU:
const at::Tensor& only_tensor(const char* what, const Tensors& tensors);
void must_be_on_cpu(const char* what, const at::Tensor& tensor);
void must_be_alike(const char* what, const Tensors& tensors, const at::Tensor& like);
// Throws if several elements lie in one place, as in an expanded tensor.
void must_be_distinct(const char* what, const at::Tensor& tensor);
void must_be_one_per_rank(const char* what, std::size_t found, int wanted);

// Allocates memory that peers can map. A tensor that a forked child has inherited releases nothing there.
struct SharedTensorAllocator : c10::Allocator {
    c10::DataPtr allocate(std::size_t bytes) override;
    void copy_data(void* to, const void* from, std::size_t bytes) const override;
};
std::shared_ptr<c10::Allocator> shared_tensor_allocator();
at::Tensor shared_tensor(at::IntArrayRef shape, at::ScalarType dtype);

// A checksum of a list of lengths, by which ranks compare theirs.
std::uint64_t checksum_of(const Counts& lengths);

}  // namespace dist_prims
