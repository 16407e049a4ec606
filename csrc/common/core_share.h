// How many threads this rank may use in a large call, so that the ranks of a host leave each other their cores.
//
// A core counts as 1 divided by the number of ranks that may run on it. Ranks that are pinned to cores of their own
// have these cores whole; ranks with the same cores divide them. The ranks of all groups of this process on this host
// count, not only the ranks of the group that makes the call.
#pragma once

#include <sched.h>

#include <cstddef>
#include <vector>

namespace dist_prims {

// Sets the function that returns how many threads the program wants: torch.get_num_threads().
void set_program_threads(int (*threads)());

// The threads of a large call on this thread. 1 on a background thread, because the program computes meanwhile.
std::size_t threads_of_rank();

// The cores of `own` for this rank; `others`: the cores of the other ranks.
double core_share(const cpu_set_t& own, const std::vector<cpu_set_t>& others);

}  // namespace dist_prims
