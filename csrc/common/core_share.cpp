#include "core_share.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <mutex>
#include <set>

#include "cgroups.h"
#include "process.h"
#include "thread_team.h"

namespace dist_prims {
namespace {

constexpr int kMostThreads = 8;  // some threads move as much as the memory can
constexpr std::chrono::seconds kBetweenReads{1};

// The ranks of this host that this process knows.
struct RanksOfHost {
    std::mutex mutex;
    std::set<int> pids;        // of other processes
    std::size_t nameless = 0;  // the most in a group that have no pid here, or are threads of this process
    std::size_t launched = 0;
};

std::atomic<int> assumed_cores{0};
std::atomic<unsigned> notes{0};  // calls of note_ranks_of_host()

// The cores of a process, or of this thread if `pid` is 0. None if the process has ended.
Cores cores_of(int pid) {
    Cores cores;
    cpu_set_t set;
    if (::sched_getaffinity(pid, sizeof set, &set) != 0) return cores;
    for (std::size_t core = 0; core < cores.size(); ++core) cores[core] = CPU_ISSET(core, &set);
    return cores;
}

// The cores' worth of time that control groups allow to this process and to all others in them.
double core_quota() {
    double least = std::numeric_limits<double>::infinity();
    for (const Cgroup& group : cgroups("cpu")) {
        double quota = 0, period = 0;
        if (group.is_v2)
            std::ifstream(group.folder + "cpu.max") >> quota >> period;  // "max 100000" without a limit
        else if (std::ifstream(group.folder + "cpu.cfs_quota_us") >> quota)
            std::ifstream(group.folder + "cpu.cfs_period_us") >> period;
        if (quota > 0 && period > 0) least = std::min(least, quota / period);
    }
    return least;
}

struct Limits {
    std::size_t cores, ranks;  // that this thread may use; of this host
    double share, quota;       // of the cores; of the quota, for one rank

    int threads() const {
        return std::clamp(static_cast<int>(std::min({share, quota, 1.0 * kMostThreads})), 1, kMostThreads);
    }
};

Limits read_limits(std::size_t launched = 0) {
    const Cores own = cores_of(0);
    std::vector<Cores> others;
    RanksOfHost& known = of_this_process<RanksOfHost>();
    const std::lock_guard lock(known.mutex);
    for (const int pid : known.pids) {
        if (const Cores cores = cores_of(pid); cores.any()) others.push_back(cores);
    }
    const std::size_t counted = 1 + others.size() + known.nameless;
    const std::size_t ranks = std::max({counted, known.launched, launched});
    return {own.count(), ranks, core_share(own, others, ranks - 1 - others.size()),
            core_quota() / static_cast<double>(ranks)};
}

std::string number_text(double number) {
    std::string text = std::to_string(std::round(number * 100) / 100);
    text.erase(text.find_last_not_of('0') + 1);
    return text.back() == '.' ? text.substr(0, text.size() - 1) : text;
}

}  // namespace

double core_share(const Cores& own, const std::vector<Cores>& others, std::size_t unknown) {
    double share = 0;
    for (std::size_t core = 0; core < own.size(); ++core) {
        if (!own[core]) continue;
        const auto users = std::count_if(others.begin(), others.end(), [&](const Cores& cores) { return cores[core]; });
        share += 1.0 / static_cast<double>(1 + unknown + static_cast<std::size_t>(users));
    }
    return share + 1e-9;  // so that three thirds are one
}

void note_ranks_of_host(const std::vector<int>& pids, std::size_t launched) {
    RanksOfHost& known = of_this_process<RanksOfHost>();
    const std::lock_guard lock(known.mutex);
    std::size_t nameless = 0;
    for (const int pid : pids) {
        if (pid == 0 || pid == this_process())
            ++nameless;
        else
            known.pids.insert(pid);
    }
    known.nameless = std::max(known.nameless, nameless - std::min<std::size_t>(nameless, 1));  // without this rank
    known.launched = std::max(known.launched, launched);
    ++notes;
}

int threads_of_call(int most) {
    using Clock = std::chrono::steady_clock;
    if (const int assumed = assumed_cores.load(std::memory_order_relaxed)) return std::min(most, assumed);
    if (most < 2) return 1;
    thread_local Clock::time_point next_read;
    thread_local unsigned seen = 0;
    thread_local int limit = 1;
    const auto now = Clock::now();
    if (const unsigned current = notes.load(); now >= next_read || seen != current) {
        limit = read_limits().threads();
        seen = current;
        next_read = now + kBetweenReads;
    }
    return std::min(most, limit);
}

std::string describe_threads(int most, std::size_t launched) {
    const Limits limits = read_limits(launched);
    const std::string ranks = " for " + std::to_string(limits.ranks) + (limits.ranks == 1 ? " rank" : " ranks");
    return std::to_string(std::max(1, std::min(most, limits.threads()))) + " in a call of " +
           std::to_string((2 * kLeastShare) >> 20) + " MB or more: the least of torch.get_num_threads(), " +
           std::to_string(most) + ", of " + std::to_string(limits.cores) + " cores" + ranks +
           (std::isinf(limits.quota) ? "" : ", of a quota of " + number_text(limits.quota) + " cores for each rank") +
           ", and of " + std::to_string(kMostThreads);
}

void assume_cores(int threads) {
    assumed_cores = threads;
}

}  // namespace dist_prims
