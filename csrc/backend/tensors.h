// Between torch's tensors and the core's bytes.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "../core/collectives.h"
#include "../core/types.h"

namespace dist_prims {

using Tensors = std::vector<at::Tensor>;

// The type as the core reduces it, or by its size if it can only be moved.
DType type_of(const at::Tensor& tensor);

Op op_of(const c10d::ReduceOp& op);

// A tensor whose memory holds its elements one after the other: itself, or a copy.
at::Tensor packed(const at::Tensor& tensor);

inline std::byte* bytes_of(const at::Tensor& tensor) {
    return static_cast<std::byte*>(tensor.data_ptr());
}

Counts lengths(const Tensors& tensors);  // in bytes
Counts elements(const Tensors& tensors);
Blocks blocks_of(const Tensors& tensors);

// An output whose memory can be written as it lies, and how the tensor gets what was written for it.
struct Output {
    at::Tensor tensor, flat;

    explicit Output(const at::Tensor& tensor) : tensor(tensor), flat(packed(tensor)) {}
    std::byte* data() const { return bytes_of(flat); }
    void deliver() const {
        if (!flat.is_same(tensor)) tensor.copy_(flat);
    }
};

struct Outputs {
    std::vector<Output> each;

    explicit Outputs(const Tensors& tensors) : each(tensors.begin(), tensors.end()) {}
    Places places() const {
        Places found;
        for (const Output& output : each) found.push_back(output.data());
        return found;
    }
    void deliver() const {
        for (const Output& output : each) output.deliver();
    }
};

Call call_of(Collective collective, const at::Tensor& like, std::size_t count);

// What PREMUL_SUM adds.
at::Tensor premultiplied(const at::Tensor& tensor, const c10d::ReduceOp& op);

// The rest are checks, which throw ValueError; `what` is the operation. The reduction, if it is one for the tensor:
Op checked(const char* what, const c10d::ReduceOp& op, const at::Tensor& tensor);
// The only tensor, which must be on the CPU:
const at::Tensor& only(const char* what, const Tensors& tensors);
void alike(const char* what, const Tensors& tensors, const at::Tensor& like);
void as_many(const char* what, std::size_t found, int wanted);

// A tensor in memory that peers can map, and what ends such memory.
at::Tensor lent_tensor(at::IntArrayRef shape, const at::TensorOptions& options);
void release_lent(void* data);

// Of a list of lengths, so that ranks can tell whether theirs are the same.
std::uint64_t checksum(const std::vector<at::Tensor>& tensors);

}  // namespace dist_prims
