// The classes of Python for MPI; see dist_prims.backend.mpi_library.
#pragma once

#include <pybind11/pybind11.h>

namespace dist_prims::mpi {

void bind(pybind11::module_& module);

}  // namespace dist_prims::mpi
