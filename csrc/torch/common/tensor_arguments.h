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

// Gives the types of torch for which csrc/common has no kernel their names, for errors. Called once in a process.
void name_dtypes();
// The DType of a tensor. Each type of torch has its own DType, also a type that can be moved but not reduced.
DType type_of(const at::Tensor& tensor);

// A packed tensor is on the CPU and contiguous, and its memory holds its values as they are: no conjugate or negative
// view.
bool is_packed(const at::Tensor& tensor);
// Returns the tensor itself if it is packed, and otherwise a packed copy. The copy from another device follows the work
// of the current stream, and is done when the function returns.
at::Tensor packed(const at::Tensor& tensor);
// Returns packed memory for the values of a tensor, without the values.
at::Tensor packed_buffer(const at::Tensor& tensor);

// Whether a CPU tensor has memory of its own. A DTensor and a FakeTensor have none; the dispatcher of torch refuses
// them, but not every call comes through it. Returns true for other devices.
inline bool has_memory(const at::Tensor& tensor) {
    return !tensor.is_cpu() || tensor.layout() != at::kStrided || tensor.numel() == 0 || tensor.storage().data();
}
constexpr const char* kNoMemory =
    ": the tensor has no memory of its own, as a DTensor; give a plain tensor, such as .to_local()";

inline std::byte* bytes_of(const at::Tensor& tensor) {
    return static_cast<std::byte*>(tensor.data_ptr());
}
inline std::byte* address_of(const at::Tensor& tensor) {
    return tensor.defined() ? bytes_of(tensor) : nullptr;
}

Counts byte_counts(const Tensors& tensors);
Counts element_counts(const Tensors& tensors);
// The address of each tensor, null for an undefined tensor: to read from, and to write to.
Blocks blocks_of(const Tensors& tensors);
Places places_of(const Tensors& tensors);

// Copies what has been received to the tensor of the user. A tensor that was made in inference mode can be written in
// inference mode only, which the user may have left.
void copy_result(const at::Tensor& tensor, const at::Tensor& received);

// The tensor of a message: `flat` is packed memory to read from or to write to, of the tensor itself or of a copy.
// deliver() copies `flat` to the tensor if it is a copy.
struct MessageData {
    at::Tensor tensor, flat;

    MessageData(const at::Tensor& tensor, bool outgoing)
        : tensor(tensor), flat(outgoing || is_packed(tensor) ? packed(tensor) : packed_buffer(tensor)) {}
    std::byte* data() const { return bytes_of(flat); }
    void deliver() const {
        if (!flat.is_same(tensor)) copy_result(tensor, flat);
    }
};

// Whether an output shares memory with another output or with an input. The input of the output's own block may have
// the same memory, from its first to its last byte. The lists are by block; a list may be empty, and tensors may be
// undefined. Tensors that are not packed do not count: the call uses copies of them.
bool outputs_overlap(const Tensors& inputs, const Tensors& outputs);

// What the ranks agree on for a collective of `count` elements of the type of `like`.
Call announced_call(Collective collective, const at::Tensor& like, std::size_t count);

// Returns what this rank adds to the sum of PREMUL_SUM: the tensor times the factor of this rank, in the tensor's type;
// for any other reduction the tensor itself. `what` is the operation in errors, here and below.
at::Tensor premultiplied(const char* what, const at::Tensor& tensor, const c10d::ReduceOp& op);

// Returns the blocks of a tensor for `size` ranks, as views: of equal lengths, or with splits[rank] rows each.
Tensors split_into_blocks(const char* what, const at::Tensor& tensor, int size,
                          const std::vector<int64_t>& splits = {});

// These are checks, which throw ValueError. Returns the reduction if it can reduce the tensor.
Op checked_op(const char* what, const c10d::ReduceOp& op, const at::Tensor& tensor);
// Returns the only tensor of the list.
const at::Tensor& only_tensor(const char* what, const Tensors& tensors);
void must_be_on_cpu(const char* what, const at::Tensor& tensor);
// The tensors must have the type and the device of `like`.
void must_be_alike(const char* what, const Tensors& tensors, const at::Tensor& like);
// Throws if several elements lie in one place, as in an expanded tensor.
void must_be_distinct(const char* what, const at::Tensor& tensor);
void must_be_one_per_rank(const char* what, std::size_t tensors, int size);

// Allocates memory that the other ranks of the host can map: for dist_prims.empty, and for torch's memory pools. In a
// forked child, the end of a tensor that the parent has allocated releases nothing.
struct SharedTensorAllocator : c10::Allocator {
    c10::DataPtr allocate(std::size_t bytes) override;
    void copy_data(void* to, const void* from, std::size_t bytes) const override;
};
std::shared_ptr<c10::Allocator> shared_tensor_allocator();
at::Tensor shared_tensor(at::IntArrayRef shape, at::ScalarType dtype);

// A checksum of a list of lengths. Ranks whose checksums are equal have the same list.
std::uint64_t checksum_of(const Counts& lengths);

}  // namespace dist_prims
