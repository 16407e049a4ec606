// MPI's names for what the core calls DType and Op.
#pragma once

#include <mpi.h>

#include "../../core/types.h"

namespace dist_prims::mpi {

// What to tell MPI so that it reduces elements of the type: its own type and operation where it has both, else an
// operation of ours over the core's kernels, on a type that is only as wide. A mean is a sum that is yet to be divided.
struct Reduction {
    MPI_Datatype type;
    MPI_Op op;
};
Reduction reduction(Op op, DType dtype);

}  // namespace dist_prims::mpi
