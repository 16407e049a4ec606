// Work that the calling thread divides with helper threads.
//
// The helpers are started for the work and end with it: no thread waits for work, and a forked child lacks none. A
// thread claims a share when it begins the share, so the calling thread does each share that no helper has begun. A
// helper that starts late, or that the system refuses, delays nothing.
#pragma once

#include <cstddef>
#include <functional>

namespace dist_prims {

// Calls work(0) to work(shares - 1), on up to `threads` threads. Returns when all calls have ended, or throws what one
// of them has thrown.
void do_shares(std::size_t threads, std::size_t shares, const std::function<void(std::size_t share)>& work);

}  // namespace dist_prims
