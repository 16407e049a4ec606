#include "core_share.h"

#include <algorithm>
#include <atomic>

#include "process.h"
#include "thread.h"

namespace dist_prims {
namespace {

constexpr int kMostThreads = 8;  // an assumption: so many cores read as fast as the memory of a NUMA node delivers

std::atomic<int (*)()> program_threads{[] { return 1; }};

// Reads the cores of a process, or of this thread if `pid` is 0. Returns false if the process has ended.
bool read_cores(int pid, cpu_set_t& cores) {
    return ::sched_getaffinity(pid, sizeof cores, &cores) == 0;
}

}  // namespace

void set_program_threads(int (*threads)()) {
    program_threads = threads;
}

std::size_t threads_of_rank() {
    const int most = in_background ? 1 : std::min(program_threads.load()(), kMostThreads);
    cpu_set_t own;
    if (most < 2 || !read_cores(0, own)) return 1;
    std::vector<cpu_set_t> others;
    for (const KnownProcess& process : known_processes()) {
        cpu_set_t cores;
        if (process.pid == 0) return 1;  // its cores are not known
        if (read_cores(process.pid, cores)) others.push_back(cores);
    }
    return static_cast<std::size_t>(std::clamp(static_cast<int>(core_share(own, others)), 1, most));
}

double core_share(const cpu_set_t& own, const std::vector<cpu_set_t>& others) {
    double share = 1e-9;  // so that three thirds are one
    for (std::size_t core = 0; core < CPU_SETSIZE; ++core) {
        const auto has_core = [=](const cpu_set_t& cores) { return CPU_ISSET(core, &cores); };
        if (has_core(own)) share += 1.0 / static_cast<double>(1 + std::ranges::count_if(others, has_core));
    }
    return share;
}

}  // namespace dist_prims
