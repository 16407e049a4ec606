// The MPI types and operations for DType and Op.
#pragma once

#include <mpi.h>

#include "../common/types.h"

namespace dist_prims::mpi {

// The arguments of an MPI reduction: MPI's own type and operation if it has both, otherwise an operation of this
// library over its kernels, on a type of the same width. A mean is a sum that is still to be divided, and never of half
// types: MPI adds those in float32.
struct Reduction {
    MPI_Datatype type;
    MPI_Op op;
};
Reduction reduction(Op op, DType dtype);

}  // namespace dist_prims::mpi
