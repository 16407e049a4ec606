// Python's view of the library for UCX.
#pragma once

#include <pybind11/pybind11.h>

namespace dist_prims::ucx {

void bind(pybind11::module_& module);

}  // namespace dist_prims::ucx
