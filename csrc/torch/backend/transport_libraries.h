// Python's MpiLibrary and UcxLibrary: the libraries of csrc/mpi and csrc/ucx, which make the transports between hosts.
#pragma once

#include <pybind11/pybind11.h>

namespace dist_prims {

// Defines these classes, and MpiEndpoint and UcxEndpoint, in the module.
void bind_transport_libraries(pybind11::module_& module);

}  // namespace dist_prims
