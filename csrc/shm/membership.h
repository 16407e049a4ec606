// The ranks of one host as processes: which rank belongs to the group, which has died or left, and why the group has
// ended.
//
// The ranks share one error. The first rank that fails writes a notice to shared memory, and every waiting rank reads
// it at intervals, so all ranks report the same cause. Every member function may be called from any thread of its rank.
//
// Memory order, for any processor:
// 1. A rank writes its verdict (wait_graph.h) before it stores the notice (release). Readers load the notice first
//    (acquire). The threads of a rank write one verdict, under verdict_guard_.
// 2. A rank stores `left` after its last message and its last phase (release). Readers load it before they look for
//    these (acquire). A process that dies stores nothing; the kernel orders its stores before it reports the end.
// 3. sleep() and wake() need sequential consistency, because each side stores and then loads what the other stores: a
//    sleeper adds to `sleepers`, then loads what `over` evaluates; the other rank stores that, then loads `sleepers`.
//    What `over` evaluates is therefore sequentially consistent too, or a mutex guards it. The sleeper loads the wake
//    count before `over`, and the kernel compares it again under the lock of its queue.
// 4. The pid is stored before its namespace (release), and loaded after it (acquire).
// 5. The cores, and the times of WaitPolicy, are hints: relaxed.
// tests/csrc/test_memory_order.py explores all executions of 3., together with phases and with ring buffers.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../common/errors.h"
#include "../common/process.h"
#include "../common/shared_memory.h"
#include "wait_graph.h"

namespace dist_prims {

using Clock = std::chrono::steady_clock;

// The numbers and titles of ranks in errors. The group rank is a rank's number in the group, the local rank its number
// on its host. If the group has one host the two are equal, and both lists are empty.
struct RankNames {
    std::vector<int> group_ranks{};     // by local rank
    std::vector<std::string> titles{};  // by group rank, for example "rank 5 on host b"
    std::string group{};                // which group, for example " of group [2, 3]"; empty if it needs no name

    int group_rank(int local_rank) const {
        return group_ranks.empty() ? local_rank : group_ranks[static_cast<std::size_t>(local_rank)];
    }
    std::string title(int rank) const {
        return titles.empty() ? "rank " + std::to_string(rank) : titles[static_cast<std::size_t>(rank)];
    }
    // How errors of this rank begin: "rank 3", or "rank 1 of group [2, 3]".
    std::string own_name(int local_rank) const { return "rank " + std::to_string(group_rank(local_rank)) + group; }
};

class Membership {
public:
    static std::size_t bytes(int size);

    // For tests: sets the wake counts and the heartbeats in new memory, before a rank uses it.
    static void set_counters(std::byte* place, int size, std::uint32_t wakes, std::uint64_t heartbeats);

    // The cause of the group's end.
    struct Notice {
        CommError::Kind kind;
        int culprit;  // a group rank; of kTimeout: the rank that has timed out
        // A group rank. kUnreachable: cannot reach the culprit; kSilent: the culprit has not replied to it, and the
        // link between them may be the cause; kLost: the culprit waits for it.
        int other = -1;
    };

    // `place` points to bytes(size) of the shared memory.
    Membership(std::shared_ptr<const Mapping> memory, std::byte* place, int rank, int size, RankNames names = {});
    ~Membership() { leave(); }
    Membership(const Membership&) = delete;

    int rank() const { return rank_; }  // local, like every rank below that is not called a group rank
    int size() const { return size_; }
    bool spans_hosts() const { return static_cast<bool>(awaited_hook_); }
    // The pid of a rank, or 0 if the rank runs in another PID namespace, where its pid has no meaning here.
    int process(int rank) const;
    int group_rank(int local_rank) const { return names_.group_rank(local_rank); }
    std::string own_name() const { return names_.own_name(rank_); }
    std::string title(int rank) const { return names_.title(rank); }

    // Publishes the core that this rank runs on. A waiting thread calls it before shares_core().
    void note_core();
    // Whether some rank >= `from` for which `awaited` holds last ran on this core, or sleeps and may wake up on it.
    // Such a rank cannot run until this rank yields the core.
    template <typename Awaited>
    bool shares_core(int from, const Awaited& awaited) const {
        for (int peer = from; peer < size_; ++peer) {
            const int peer_core = core(peer);
            if ((peer_core == core_ || peer_core == kNowhere) && peer != rank_ && awaited(peer)) return true;
        }
        return false;
    }

    // Watches the processes of the other ranks: `exits` has the exit descriptor of each rank (rendezvous.h).
    void watch(std::vector<ExitDescriptor> exits) { exits_ = std::move(exits); }
    // The group ranks whose processes have ended, including ranks that had left before.
    std::vector<int> ended() const {
        return ended_processes([](int) { return true; });
    }

    // Sets a hook that every wait calls at intervals, on the waiting thread. An exception from the hook ends the wait.
    // `is_being_made`: the group is not complete, so an error about a rank that cannot be reached mentions firewalls.
    void on_wait(std::function<void()> interrupt, bool is_being_made = false) {
        interrupt_ = std::move(interrupt);
        is_being_made_ = is_being_made;
    }
    // Sets a hook that waits for ranks of this host call at intervals. Its argument is the group rank of one awaited
    // rank.
    void on_awaited(std::function<void(int)> hook) { awaited_hook_ = std::move(hook); }

    // Sleeps until a thread calls wake() for this rank, for 10 ms at most; returns at once if `over` holds. A rank that
    // makes a change for which others may wait calls wake() afterwards. No wake-up is lost: this rank registers as a
    // sleeper, then evaluates `over`; the other rank makes its change, then looks for sleepers. So either this rank
    // sees the change, or the other rank sees the sleeper. wake() changes the wake count on which the sleeper waits.
    template <typename Over>
    void sleep(const Over& over) {
        const unsigned seen = begin_sleep();
        if (!over()) futex_wait(seen);
        end_sleep();
    }
    void wake(int rank) const;

    // Announces that this rank makes no further calls. Ranks that wait for it, now or later, get an error.
    void leave();
    bool has_left(int rank) const;
    // Makes the waits of other threads of this rank throw at their next check.
    void stop() { stopped_.store(true, std::memory_order_release); }

    // Describes the current operation for an error message; called only when there is an error.
    using What = std::function<std::string()>;

    // Throws the cause if the group has ended.
    void check_abort(const What& what) const;
    // The cause of the group's end: the first notice of all ranks. None as long as the group has not ended.
    std::optional<Notice> notice() const;
    // Ends the group, unless it has ended; returns whether this notice is the first.
    bool give_notice(const Notice& notice) const;
    // Ends the group, unless it has ended, and throws this notice, even if another one is the first.
    [[noreturn]] void throw_failure(const Notice& notice, const What& what) const;
    // The group rank of a process that ended without leave(); -1 if there is none.
    int dead_rank() const;
    // The group ranks that the error of the group names as dead, lost or late.
    std::vector<int> named_ranks() const;
    // Of kSilent: the two group ranks of which one may be cut off from the others, the culprit first.
    std::vector<int> doubtful_ranks() const;

    // Called at intervals by a wait for the ranks for which `awaited` holds. Throws, and ends the group, if one of
    // these ranks has died or left, if the group has ended, or if stop() or the hook of on_wait() ends the wait.
    void check_failures(const std::function<bool(int)>& awaited, const What& what);

    // Ends the group because this rank has timed out, and throws. `what`: the timeout and the operation, as text.
    // `late`: the verdict of the diagnosis, which is empty in a group that spans hosts.
    [[noreturn]] void throw_timeout(const std::string& what, const WaitGraph::Verdict& late = {});

    WaitGraph& wait_graph() { return wait_graph_; }
    // From now on waits of this process in one of its groups count in all. Each rank must be a process of its own.
    void join_groups_of_process() {
        wait_graph_.join(WaitGraphs::of_this_process(), [this](int rank) { return process(rank); });
    }
    // Whether the diagnosis of a wait that has timed out is final. Always true in a group that spans hosts, which has
    // another diagnosis: see net/timeout_diagnosis.h.
    bool is_final(LocalDiagnosis& diagnosis, const WaitGraph::Waits& waits, std::chrono::milliseconds timeout) const {
        return spans_hosts() || diagnosis.is_final(wait_graph_, waits, timeout);
    }

private:
    static constexpr int kNowhere = -1;  // the core of a sleeping rank

    friend class WaitPolicy;
    struct RankState;
    struct GroupState;

    RankState& rank_state(int rank) const;
    GroupState& group_state() const;
    unsigned begin_sleep();
    void futex_wait(unsigned seen);
    void end_sleep();
    int core(int rank) const;
    void check_stop(const What& what) const;
    void run_awaited_hook(const std::function<bool(int)>& awaited) const;
    std::vector<int> ended_processes(const std::function<bool(int)>& awaited) const;
    int local_rank(int group_rank) const;
    WaitGraph::Verdict verdict_of(int culprit) const;
    std::string verdict_text(const WaitGraph::Verdict& late) const;
    std::string late_rank_text(int late) const;
    std::string location_text(const WaitGraph::Late& late, std::size_t ranks) const;
    std::string error_text(const Notice& notice, const std::string& what) const;
    std::string loss_text(int culprit) const;
    std::string awaited_text(int culprit) const;

    const std::shared_ptr<const Mapping> memory_;
    std::byte* const place_;
    const int rank_, size_;
    const RankNames names_;
    std::vector<ExitDescriptor> exits_;  // by rank; null for ranks that run in this process
    WaitGraph wait_graph_;
    std::mutex verdict_guard_;
    bool has_verdict_ = false;  // this rank has written its verdict; under verdict_guard_
    std::function<void()> interrupt_;
    bool is_being_made_ = false;
    std::function<void(int)> awaited_hook_;  // set in a group that spans hosts, null otherwise
    std::atomic<int> core_{kNowhere};        // what this rank has published
    // Of WaitPolicy: when sched_yield() is tried again, and for how long it is not tried after the next slow one.
    std::atomic<Clock::rep> yield_again_{0}, backoff_{0};
    std::atomic<bool> stopped_{false};
};

}  // namespace dist_prims
