// The loops of kernels_body.h, compiled for any processor.
#include "kernels_sets.h"

namespace dist_prims::generic {
#include "kernels_body.h"
}  // namespace dist_prims::generic
