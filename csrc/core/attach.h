// How ranks of one host come to share memory: rank 0 hands the descriptor over an abstract Unix socket.
//
// An abstract socket leaves no file behind and is not seen from another network namespace, so who can connect is on
// this host. Who connects must have our user id and say the word of this meeting, a random one: an address that a dead
// job left in a store leads nowhere, and a stranger is dropped.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "memory.h"

namespace dist_prims {

using Clock = std::chrono::steady_clock;

// Rank 0: make memory, listen, say the word of this meeting by `tell`, and serve ranks 1 to size - 1.
Descriptor host_memory(std::size_t bytes, int size, const std::function<void(const std::string&)>& tell,
                       Clock::time_point deadline);

// Another rank: ask `word` for what rank 0 told, as often as it leads nowhere, and fetch the memory.
Descriptor fetch_memory(int rank, const std::function<std::string()>& word, Clock::time_point deadline);

}  // namespace dist_prims
