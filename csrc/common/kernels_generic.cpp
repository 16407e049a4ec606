// The loops of kernels_body.h, compiled for any processor.
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#include "kernels_sets.h"

namespace dist_prims::generic {
#include "kernels_body.h"
}  // namespace dist_prims::generic
