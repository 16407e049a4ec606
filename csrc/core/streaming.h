// Copies past the cache, for what is not read again soon. An ordinary store first fetches the line that it writes to,
// and drives another line out.
#pragma once

#include <cstddef>

namespace dist_prims {

void copy_past_cache(std::byte* to, const std::byte* from, std::size_t bytes);

// Such copies may still be on their way when a later store is seen by others. After this they are not.
void end_past_cache();

}  // namespace dist_prims
