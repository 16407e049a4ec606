// How much memory this process can still get.
//
// A reservation of shared memory that exceeds it does not fail: the kernel kills processes instead, of any user or of
// the control group. So a large request is compared with what is available first.
#pragma once

#include <cstddef>

namespace dist_prims {

// The least, in bytes, of what the machine and the control groups of this process (v1 or v2) have left. The page cache
// of files counts as available.
std::size_t available_memory();

}  // namespace dist_prims
