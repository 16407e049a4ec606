// The wait-for graph of the ranks of one host, in shared memory. It tells which rank is late when a wait times out.
//
// A rank that times out knows only which rank it was waiting for, and that rank may itself be blocked. So every thread
// publishes its wait once the wait is long. A wait is an edge of the graph. A rank that times out follows the edges to
// their end: the ranks that wait for no other rank are late.
//
//     rank 0   all_reduce, timed out     waits for rank 1
//     rank 1   recv                      waits for rank 2
//     rank 2   has published nothing     is late
//
// A rank has two nodes: one for the threads of the application, and one for its collectives, which may run on a thread
// of the backend while the application continues. So a rank that computes is late for a recv of another rank, although
// one of its collectives is blocked.
//
// Memory order, for any processor: a published wait is one word, so it needs no other data. A verdict is ordered by the
// notice of the failure (membership.h). What else a search loads is stale by moments at most, and the verdict must stay
// the same for a while before it counts.
//
// A published wait may be stale, so each edge is verified:
// 1. An edge between collectives is derived from the phase counters of the slot exchange, which are never stale.
// 2. An edge of a message counts only while its ring buffer agrees: empty for a receive, full for a send.
// 3. A process that is stopped by a signal leaves its last wait published. Once its peer has sent, the ring buffer has
//    data, the edge does not count, and the stopped rank is the end of a chain: it is late. Before that, the stopped
//    rank may look like a part of a deadlock. Every blocked rank increments a counter, its heartbeat, by which a
//    stopped rank differs from a blocked one.
//
// A process is a rank of several groups. If it is blocked in one of them, it publishes the pid of the process that is
// late there in the graphs of all its other groups.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

namespace dist_prims {

class WaitGraphs;

class WaitGraph {
public:
    static constexpr int kAnyone = -1;

    enum class WaitKind : std::uint8_t { kNone, kCollective, kReceive, kSend, kElsewhere };  // the last: another group
    struct Wait {
        WaitKind kind = WaitKind::kNone;
        bool in_collective = false;  // kReceive and kSend: the message belongs to a collective
        int peer = kAnyone;          // kReceive and kSend: the other rank; kElsewhere: the pid of the late process
        bool in_background = false;  // a thread of the backend waits, and the application continues
    };
    using Waits = std::vector<Wait>;

    // Where a rank is in its collectives: phases posted, calls begun, and the number of the last call (Call::sequence).
    struct Position {
        std::uint64_t phase = 0, calls = 0, number = 0;
    };

    enum class LateState : std::int32_t { kHasNotMadeCall, kIsInCall, kIsInNoCall };
    struct Late {
        std::int32_t rank;  // or -pid of a process that is not in the group
        LateState state;
        std::uint64_t number;  // of the call
    };
    // The result of a diagnosis: the late ranks, or the ranks of a deadlock in the order in which they wait.
    struct Verdict {
        static constexpr std::size_t kMost = 8;

        std::uint32_t count = 0;  // zero: nothing is known. If above kMost, the further ranks have no entry
        bool is_deadlock = false;
        Late ranks[kMost] = {};

        std::span<const Late> entries() const { return {ranks, std::min<std::size_t>(count, kMost)}; }
        void add(const Late& late);
        bool has(int rank) const;
        bool names_the_same(const Verdict& other) const;
    };

    static std::size_t bytes(int size);

    // For tests: set the heartbeats of all ranks to `value`, before a rank uses the memory.
    static void set_heartbeats(std::byte* place, int size, std::uint64_t value);

    // `place`: bytes(size) of the shared memory, which must outlive this object.
    WaitGraph(std::byte* place, int rank, int size) : place_(place), rank_(rank), size_(size) {}
    ~WaitGraph();
    WaitGraph(const WaitGraph&) = delete;

    // From now on a wait of this process in one of its groups is published in the graphs of all of them.
    // `pid_of`: the pid of a rank, 0 if it is not known.
    void join(std::shared_ptr<WaitGraphs> groups, std::function<int(int rank)> pid_of);

    // Set before the first wait: functions that return where a rank is in its collectives (slot_exchange.h), and
    // whether a rank still waits for a message (p2p.h). Both read the shared memory only.
    void position_by(std::function<Position(int rank)> position) { position_ = std::move(position); }
    void verify_by(std::function<bool(int rank, const Wait& wait)> is_blocked) { is_blocked_ = std::move(is_blocked); }

    // A rank that waits calls this at intervals, which shows that it is not stopped.
    void heartbeat();
    std::vector<std::uint64_t> heartbeats() const;  // of all ranks

    // The wait of a thread, published from set() until the object is destroyed. A wait calls set() at intervals, once
    // it is long. In the other groups of the process set() publishes which processes are late in this group.
    class Published {
    public:
        explicit Published(WaitGraph& graph);
        ~Published();
        Published(const Published&) = delete;

        void set(const Wait& wait);
        // Call it when the wait has ended with an error, unless an exception destroys this object.
        void fail() { has_failed_ = true; }

    private:
        struct Elsewhere;

        void publish_elsewhere(const Wait& wait);

        WaitGraph& graph_;
        const int exceptions_;  // std::uncaught_exceptions() at the construction
        bool has_failed_ = false;
        std::atomic<std::uint64_t>* slot_ = nullptr;  // in the shared memory; null: not published
        std::unique_ptr<Elsewhere> elsewhere_;        // null: not published in other groups
    };

    // The ranks at the end of the edges that begin at this rank.
    // waits: what the thread of this rank waits for.
    // since: an earlier result of heartbeats(). A rank without a heartbeat since then is stopped, so what it has
    //     published about other groups does not count.
    Verdict find_late(const Waits& waits, const std::vector<std::uint64_t>& since) const;
    // Where a late rank is: the call that it has not made, or the call that it has not completed.
    Late describe(int rank, bool in_collective) const;

    // Writes the verdict of this rank, once, before the rank writes the notice of the failure. verdict(rank) may be
    // called after the notice of that rank was read.
    void write_verdict(const Verdict& verdict);
    const Verdict& verdict(int rank) const;

private:
    static constexpr std::size_t kSlots = 7;  // published waits of one rank at a time; further waits are not published

    struct RankEntry;
    struct Node {
        int rank;
        bool is_collectives;
    };
    using Nodes = std::vector<Node>;
    class Search;

    friend class WaitGraphs;

    RankEntry& entry(int rank) const;
    std::atomic<std::uint64_t>* take_slot(const Wait& wait) const;
    int rank_of(int pid) const;
    Waits published_waits(int rank) const;
    Nodes ranks_behind(int rank) const;
    Nodes awaited_nodes(int rank, const Wait& wait) const;
    Nodes edges_from(const Node& node, const std::vector<std::uint64_t>& since) const;
    Nodes edges_of_collectives(int rank) const;
    void add_message_edges(int rank, bool in_collective, Nodes& nodes) const;
    void add_elsewhere_edges(int rank, const std::vector<std::uint64_t>& since, Nodes& nodes) const;

    std::byte* const place_;
    const int rank_, size_;
    std::function<Position(int)> position_;
    std::function<bool(int, const Wait&)> is_blocked_;
    std::shared_ptr<WaitGraphs> groups_;  // null: the other groups of this process are not known
    std::function<int(int)> pid_of_;
};

// The graphs of all groups in which this process is a rank.
class WaitGraphs {
public:
    static std::shared_ptr<WaitGraphs> of_this_process();

    struct Slot {
        WaitGraph* graph;
        std::uint64_t id;  // of the graph, because a later graph may have the same address
        std::atomic<std::uint64_t>* place;
    };
    using Slots = std::vector<Slot>;

    void add(WaitGraph& graph);
    void remove(WaitGraph& graph);
    // For tests: the number of the next graph.
    void number_from(std::uint64_t id);

    // The functions below act on the graphs of all groups but the group of `origin`, in which this process is blocked.
    void heartbeat(const WaitGraph& origin);
    // Publishes that this process waits for the processes `pids`.
    Slots publish(const WaitGraph& origin, const std::vector<int>& pids);
    void clear(Slots& slots);
    // Instead of clear() when the wait has ended with an error: ranks that time out soon afterwards need to know why
    // this process was late. The slots are cleared when this process waits again, or by forget_old_failures() later.
    void clear_later(Slots& slots);
    void forget_old_failures();

private:
    void clear_under_lock(Slots& slots);
    bool exists(const Slot& slot) const;

    std::mutex mutex_;  // of all members below
    std::map<WaitGraph*, std::uint64_t> ids_;
    std::uint64_t next_id_ = 0;
    Slots failed_;
    std::chrono::steady_clock::time_point last_failure_{};
};

// The diagnosis of one wait that has timed out. The wait continues meanwhile, and may still succeed.
class LocalDiagnosis {
public:
    static constexpr std::chrono::seconds kLongest{1};  // the duration of a diagnosis

    // To be called repeatedly after the timeout. Returns true when the verdict is final: it has been the same for a
    // while, in which ranks that begin to wait publish their waits, or the time for the diagnosis is over.
    bool is_final(const WaitGraph& graph, const WaitGraph::Waits& waits, std::chrono::milliseconds timeout);
    const WaitGraph::Verdict& verdict() const { return verdict_; }

private:
    using Clock = std::chrono::steady_clock;

    WaitGraph::Verdict silent_ranks(const WaitGraph& graph) const;

    Clock::time_point began_{}, unchanged_since_{};
    WaitGraph::Verdict verdict_;
    std::vector<std::uint64_t> heartbeats_;  // when the diagnosis began, by rank
};

// What a wait creates when it begins to sleep. A short wait does not need it.
struct LongWait {
    explicit LongWait(WaitGraph& graph) : published(graph) {}

    WaitGraph::Published published;
    LocalDiagnosis diagnosis;
};

}  // namespace dist_prims
