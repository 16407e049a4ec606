// Functions of the module _backend that make a synchronous collective without torch.distributed, for
// dist_prims.collectives. Each returns False, and makes no call, unless its group has a PrimsBackend for CPU tensors,
// and its tensors can be passed to that backend unchanged.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace dist_prims {

// Adds the functions to the module.
void bind_direct_calls(pybind11::module_& module);

}  // namespace dist_prims
