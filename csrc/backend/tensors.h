// Between torch's tensors and the core's bytes.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "../core/types.h"

namespace dist_prims {

// The type as the core reduces it, or by its size if it can only be moved.
DType type_of(const at::Tensor& tensor);

Op op_of(const c10d::ReduceOp& op);

// A tensor whose memory holds its elements one after the other: itself, or a copy.
at::Tensor packed(const at::Tensor& tensor);

inline std::byte* bytes_of(const at::Tensor& tensor) {
    return static_cast<std::byte*>(tensor.data_ptr());
}

// Of a list of lengths, so that ranks can tell whether theirs are the same.
std::uint64_t checksum(const std::vector<at::Tensor>& tensors);

}  // namespace dist_prims
