// Copies past the cache, for data that is not read again soon. An ordinary store first fetches its cache line and
// evicts another one.
#pragma once

#include <cstddef>

namespace dist_prims {

void copy_past_cache(std::byte* to, const std::byte* from, std::size_t bytes);

// Orders the copies before later stores. Without it a later store, even a release, may be visible to others before the
// copies are: x86 orders such stores by a fence only. Elsewhere the copies are ordinary stores, which a release orders.
void end_past_cache();

}  // namespace dist_prims
