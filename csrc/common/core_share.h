// How many threads a large call of this process uses, so that the ranks of a host leave each other their cores.
//
// A core counts for this rank as 1 divided by the number of ranks that may run on it. Ranks that are pinned to cores of
// their own have them whole; ranks with the same cores divide them. All ranks of the host count, in whichever group
// they make a call: those of the groups of this process, and those that the launcher has started beside them.
#pragma once

#include <sched.h>

#include <bitset>
#include <cstddef>
#include <string>
#include <vector>

namespace dist_prims {

// By the number of the core. On a machine with more cores than this, calls use one thread.
using Cores = std::bitset<CPU_SETSIZE>;

// The cores of `own` for this rank. `others`: the cores of other ranks; `unknown`: how many ranks there are beside
// these, which may run on any core.
double core_share(const Cores& own, const std::vector<Cores>& others, std::size_t unknown);

// Notes the ranks of a new group on this host. `pids`: of all of them, 0 where a pid has no meaning in this process.
// `launched`: how many ranks the launcher has started on this host; 0 if that is not known.
void note_ranks_of_host(const std::vector<int>& pids, std::size_t launched);

// The threads of a large call on this thread, at most `most`. The limits are read once a second.
int threads_of_call(int most);
// The same as a line of text, with the reasons, before this process has a group.
std::string describe_threads(int most, std::size_t launched);

// For tests: large calls use up to `threads` threads, whatever cores there are; 0 ends that.
void assume_cores(int threads);

}  // namespace dist_prims
