#include "wait_graph.h"

#include <algorithm>
#include <exception>
#include <type_traits>
#include <utility>

#include "../common/counter_order.h"
#include "../common/process.h"

namespace dist_prims {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// How long a verdict must stay the same: a quarter of the timeout within these bounds. Blocked ranks heartbeat every
// 10 ms. A diagnosis takes at most four times as long.
constexpr std::chrono::milliseconds kLeastSettling = 20ms, kMostSettling = 250ms;
constexpr int kLongestInSettlings = 4;
// How often a blocked thread looks which processes to publish in its other groups, and how many of them.
constexpr auto kBetweenLooksElsewhere = 100ms;
constexpr std::size_t kMostElsewhere = 2;
constexpr auto kFailureCounts = 5s;  // how long a failure in another group explains why a rank is late

std::uint64_t packed(const WaitGraph::Wait& wait) {
    const auto peer = static_cast<std::uint32_t>(wait.peer);
    const std::uint64_t flags = std::uint64_t{wait.in_background} << 1 | std::uint64_t{wait.in_collective};
    return std::uint64_t{peer} << 32 | flags << 8 | static_cast<std::uint64_t>(wait.kind);
}

WaitGraph::Wait unpacked(std::uint64_t word) {
    return {static_cast<WaitGraph::WaitKind>(word & 0xFF), (word >> 8 & 1) != 0, static_cast<std::int32_t>(word >> 32),
            (word >> 9 & 1) != 0};
}

}  // namespace

// What a rank publishes; no other rank writes to it.
struct WaitGraph::RankEntry {
    alignas(kCacheLine) std::atomic<std::uint64_t> slots[kSlots];  // packed waits; zero: free
    std::atomic<std::uint64_t> heartbeats;
    alignas(kCacheLine) std::atomic<Clock::rep> failed_elsewhere;  // when a wait in another group ended with an error
    alignas(kCacheLine) Verdict verdict;
};

static_assert(std::is_trivially_copyable_v<WaitGraph::Verdict>);

std::size_t WaitGraph::bytes(int size) {
    return static_cast<std::size_t>(size) * sizeof(RankEntry);
}

void WaitGraph::set_heartbeats(std::byte* place, int size, std::uint64_t value) {
    for (int rank = 0; rank < size; ++rank) reinterpret_cast<RankEntry*>(place)[rank].heartbeats.store(value);
}

WaitGraph::RankEntry& WaitGraph::entry(int rank) const {
    return reinterpret_cast<RankEntry*>(place_)[rank];
}

void WaitGraph::heartbeat() {
    entry(rank_).heartbeats.fetch_add(1, std::memory_order_relaxed);
    if (groups_) groups_->forget_old_failures();
}

void WaitGraph::write_verdict(const Verdict& verdict) {
    entry(rank_).verdict = verdict;
}

const WaitGraph::Verdict& WaitGraph::verdict(int rank) const {
    return entry(rank).verdict;
}

void WaitGraph::Verdict::add(const Late& late) {
    if (count < kMost) ranks[count] = late;
    ++count;
}

bool WaitGraph::Verdict::has(int rank) const {
    return std::ranges::find(entries(), rank, &Late::rank) != entries().end();
}

bool WaitGraph::Verdict::names_the_same(const Verdict& other) const {
    return count == other.count && is_deadlock == other.is_deadlock &&
           std::ranges::equal(entries(), other.entries(), {}, &Late::rank, &Late::rank);
}

// What a wait has published in the graphs of other groups.
struct WaitGraph::Published::Elsewhere {
    std::vector<std::uint64_t> since;  // heartbeats in this group when the wait became long
    Clock::time_point next_look{};
    std::vector<int> pids;  // of the late processes
    WaitGraphs::Slots slots;
};

WaitGraph::Published::Published(WaitGraph& graph) : graph_(graph), exceptions_(std::uncaught_exceptions()) {}

WaitGraph::Published::~Published() {
    if (slot_) slot_->store(0);
    if (!elsewhere_) return;
    if (has_failed_ || std::uncaught_exceptions() > exceptions_)
        graph_.groups_->clear_later(elsewhere_->slots);
    else
        graph_.groups_->clear(elsewhere_->slots);
}

void WaitGraph::Published::set(const Wait& wait) {
    if (slot_)
        slot_->store(packed(wait));
    else
        slot_ = graph_.take_slot(wait);
    if (graph_.groups_ && !wait.in_background) publish_elsewhere(wait);
}

// Finds which processes are late in this group, and publishes their pids in the other groups of this process.
void WaitGraph::Published::publish_elsewhere(const Wait& wait) {
    if (!elsewhere_) elsewhere_ = std::make_unique<Elsewhere>(Elsewhere{graph_.heartbeats(), {}, {}, {}});
    WaitGraphs& groups = *graph_.groups_;
    groups.heartbeat(graph_);
    // 1. Which processes are late in this group, apart from this one?
    if (Clock::now() < elsewhere_->next_look) return;
    elsewhere_->next_look = Clock::now() + kBetweenLooksElsewhere;
    const Verdict verdict = graph_.find_late({wait}, elsewhere_->since);
    std::vector<int> pids;
    for (std::size_t index = 0; index < std::min<std::size_t>(verdict.count, kMostElsewhere); ++index) {
        const int rank = verdict.ranks[index].rank, pid = rank < 0 ? -rank : graph_.pid_of_(rank);
        if (pid && rank != graph_.rank_) pids.push_back(pid);
    }
    // 2. Replace what was published.
    if (pids == elsewhere_->pids) return;
    groups.clear(elsewhere_->slots);
    elsewhere_->slots = groups.publish(graph_, pids);
    elsewhere_->pids = std::move(pids);
}

WaitGraph::~WaitGraph() {
    if (groups_) groups_->remove(*this);
}

void WaitGraph::join(std::shared_ptr<WaitGraphs> groups, std::function<int(int)> pid_of) {
    pid_of_ = std::move(pid_of);
    groups_ = std::move(groups);
    groups_->add(*this);
}

// Returns a slot of this rank that publishes the wait; null if all slots are in use.
std::atomic<std::uint64_t>* WaitGraph::take_slot(const Wait& wait) const {
    for (auto& slot : entry(rank_).slots) {
        std::uint64_t free = 0;
        if (slot.compare_exchange_strong(free, packed(wait))) return &slot;
    }
    return nullptr;
}

// The rank of a process; -pid if the process is not a rank of this group.
int WaitGraph::rank_of(int pid) const {
    for (int rank = 0; pid_of_ && rank < size_; ++rank) {
        if (pid_of_(rank) == pid) return rank;
    }
    return -pid;
}

WaitGraph::Waits WaitGraph::published_waits(int rank) const {
    Waits waits;
    for (const auto& slot : entry(rank).slots) {
        const Wait wait = unpacked(slot.load());
        if (wait.kind != WaitKind::kNone) waits.push_back(wait);
    }
    return waits;
}

// The collectives of the ranks that have posted the fewest phases; none if `rank` is one of these ranks. All other
// ranks wait for these ranks.
WaitGraph::Nodes WaitGraph::ranks_behind(int rank) const {
    std::vector<std::uint64_t> phases;
    for (int peer = 0; peer < size_; ++peer) phases.push_back(position_(peer).phase);
    const std::uint64_t least = *std::min_element(phases.begin(), phases.end(), precedes);
    Nodes nodes;
    if (least == phases[static_cast<std::size_t>(rank)]) return nodes;
    for (int peer = 0; peer < size_; ++peer) {
        if (phases[static_cast<std::size_t>(peer)] == least) nodes.push_back({peer, true});
    }
    return nodes;
}

// A receive from any rank waits for all other ranks.
WaitGraph::Nodes WaitGraph::awaited_nodes(int rank, const Wait& wait) const {
    if (wait.peer != kAnyone) return {{wait.peer, wait.in_collective}};
    Nodes nodes;
    for (int peer = 0; peer < size_; ++peer) {
        if (peer != rank) nodes.push_back({peer, wait.in_collective});
    }
    return nodes;
}

// Adds the nodes for which `rank` waits by the messages of its collectives, or of its program.
void WaitGraph::add_message_edges(int rank, bool in_collective, Nodes& nodes) const {
    for (const Wait& wait : published_waits(rank)) {
        const bool is_message = wait.kind == WaitKind::kReceive || wait.kind == WaitKind::kSend;
        if (!is_message || wait.in_collective != in_collective || !is_blocked_(rank, wait)) continue;
        for (const Node& awaited : awaited_nodes(rank, wait)) nodes.push_back(awaited);
    }
}

// Adds the processes for which `rank` waits in its other groups, or waited before a recent failure there. What a
// stopped rank has published does not count.
void WaitGraph::add_elsewhere_edges(int rank, const std::vector<std::uint64_t>& since, Nodes& nodes) const {
    if (pid_of_ && pid_of_(rank) == 0) return;  // the rank has published pids of another PID namespace
    const RankEntry& published = entry(rank);
    const auto now = Clock::now().time_since_epoch().count();
    const bool has_failed = now - published.failed_elsewhere.load() < Clock::duration(kFailureCounts).count();
    const std::uint64_t heartbeats = published.heartbeats.load(std::memory_order_relaxed);
    if (heartbeats == since[static_cast<std::size_t>(rank)] && !has_failed) return;
    for (const Wait& wait : published_waits(rank)) {
        if (wait.kind == WaitKind::kElsewhere) nodes.push_back({rank_of(wait.peer), false});
    }
}

WaitGraph::Nodes WaitGraph::edges_of_collectives(int rank) const {
    Nodes nodes = ranks_behind(rank);
    if (nodes.empty()) add_message_edges(rank, true, nodes);
    return nodes;
}

// The nodes for which a node waits. A rank whose collectives wait for nothing has not made the call yet, so its
// collectives wait for what its program waits for. A program in a collective waits for what its collectives wait for.
WaitGraph::Nodes WaitGraph::edges_from(const Node& node, const std::vector<std::uint64_t>& since) const {
    const auto published = published_waits(node.rank);
    const bool is_in_collective = std::any_of(published.begin(), published.end(), [](const Wait& wait) {
        return wait.kind == WaitKind::kCollective || (wait.in_collective && !wait.in_background);
    });
    Nodes nodes;
    if (node.is_collectives || is_in_collective) nodes = edges_of_collectives(node.rank);
    if (node.is_collectives && !nodes.empty()) return nodes;
    add_message_edges(node.rank, false, nodes);
    add_elsewhere_edges(node.rank, since, nodes);
    return nodes;
}

// A depth-first search. Nodes without edges are late. If there are none, the first circle is a deadlock.
class WaitGraph::Search {
public:
    Search(const WaitGraph& graph, const std::vector<std::uint64_t>& since)
        : graph_(graph), since_(since), visited_(2 * static_cast<std::size_t>(graph.size_)) {}

    void visit(const Node& node) {
        if (node.rank < 0) return add_late({node.rank, LateState::kIsInNoCall, 0});  // a process of another group
        if (std::exchange(visited_[2 * static_cast<std::size_t>(node.rank) + node.is_collectives], char{1}))
            return note_deadlock(node);
        path_.push_back(node);
        const Nodes awaited = graph_.edges_from(node, since_);
        for (const Node& next : awaited) visit(next);
        if (awaited.empty()) add_late(graph_.describe(node.rank, node.is_collectives));
        path_.pop_back();
    }

    const Verdict& verdict() const { return late_.count ? late_ : deadlock_; }

private:
    void add_late(const Late& late) {
        if (!late_.has(late.rank)) late_.add(late);
    }

    // The search has met a node again. If the node is on the current path, the path from there on is a circle.
    void note_deadlock(const Node& node) {
        auto member = std::find_if(path_.begin(), path_.end(), [&](const Node& other) {
            return other.rank == node.rank && other.is_collectives == node.is_collectives;
        });
        if (deadlock_.count || member == path_.end()) return;
        deadlock_.is_deadlock = true;
        for (; member != path_.end(); ++member) {
            if (!deadlock_.has(member->rank)) deadlock_.add(graph_.describe(member->rank, member->is_collectives));
        }
    }

    const WaitGraph& graph_;
    const std::vector<std::uint64_t>& since_;
    Nodes path_;
    std::vector<char> visited_;  // by 2 * rank + is_collectives
    Verdict late_, deadlock_;
};

WaitGraph::Verdict WaitGraph::find_late(const Waits& waits, const std::vector<std::uint64_t>& since) const {
    Search search(*this, since);
    for (const Wait& wait : waits) {
        const bool is_collective = wait.kind == WaitKind::kCollective;
        const Nodes awaited = is_collective ? edges_of_collectives(rank_) : awaited_nodes(rank_, wait);
        for (const Node& node : awaited) search.visit(node);
    }
    return search.verdict();
}

std::vector<std::uint64_t> WaitGraph::heartbeats() const {
    std::vector<std::uint64_t> counts;
    for (int rank = 0; rank < size_; ++rank) counts.push_back(entry(rank).heartbeats.load(std::memory_order_relaxed));
    return counts;
}

WaitGraph::Late WaitGraph::describe(int rank, bool in_collective) const {
    const Position position = position_(rank);
    Position furthest = position;  // of all ranks, by calls
    std::uint64_t last_phase = position.phase;
    for (int peer = 0; peer < size_; ++peer) {
        const Position other = position_(peer);
        if (precedes(furthest.calls, other.calls)) furthest = other;
        last_phase = std::max(last_phase, other.phase, precedes);
    }
    if (precedes(position.calls, furthest.calls)) return {rank, LateState::kHasNotMadeCall, furthest.number};
    const bool is_in_call = in_collective || precedes(position.phase, last_phase);
    return {rank, is_in_call ? LateState::kIsInCall : LateState::kIsInNoCall, position.number};
}

std::shared_ptr<WaitGraphs> WaitGraphs::of_this_process() {
    struct Own {
        int process = this_process();
        std::shared_ptr<WaitGraphs> graphs = std::make_shared<WaitGraphs>();
    };
    // The object is never destroyed. There is no lock, which a forked child might find locked.
    static std::atomic<Own*> current{nullptr};
    Own* own = current.load(std::memory_order_acquire);
    if (own && own->process == this_process()) return own->graphs;
    auto fresh = std::make_unique<Own>();
    return (current.compare_exchange_strong(own, fresh.get()) ? fresh.release() : own)->graphs;
}

void WaitGraphs::add(WaitGraph& graph) {
    const std::lock_guard lock(mutex_);
    ids_[&graph] = next_id_++;
}

void WaitGraphs::number_from(std::uint64_t id) {
    const std::lock_guard lock(mutex_);
    next_id_ = id;
}

void WaitGraphs::remove(WaitGraph& graph) {
    const std::lock_guard lock(mutex_);
    ids_.erase(&graph);
}

void WaitGraphs::heartbeat(const WaitGraph& origin) {
    const std::lock_guard lock(mutex_);
    clear_under_lock(failed_);
    for (const auto& [graph, id] : ids_) {
        if (graph != &origin) graph->entry(graph->rank_).heartbeats.fetch_add(1, std::memory_order_relaxed);
    }
}

WaitGraphs::Slots WaitGraphs::publish(const WaitGraph& origin, const std::vector<int>& pids) {
    const std::lock_guard lock(mutex_);
    Slots slots;
    for (const auto& [graph, id] : ids_) {
        if (graph == &origin) continue;
        for (const int pid : pids) {
            auto* const place = graph->take_slot({WaitGraph::WaitKind::kElsewhere, false, pid});
            if (place) slots.push_back({graph, id, place});
        }
    }
    return slots;
}

void WaitGraphs::clear(Slots& slots) {
    const std::lock_guard lock(mutex_);
    clear_under_lock(slots);
}

void WaitGraphs::clear_later(Slots& slots) {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now().time_since_epoch().count();
    for (const Slot& slot : slots) {
        if (exists(slot)) slot.graph->entry(slot.graph->rank_).failed_elsewhere.store(now);
        failed_.push_back(slot);
    }
    last_failure_ = Clock::now();
}

void WaitGraphs::forget_old_failures() {
    const std::lock_guard lock(mutex_);
    if (!failed_.empty() && Clock::now() - last_failure_ > kFailureCounts) clear_under_lock(failed_);
}

void WaitGraphs::clear_under_lock(Slots& slots) {
    for (const Slot& slot : slots) {
        if (exists(slot)) slot.place->store(0);
    }
    slots.clear();
}

// False if the graph was destroyed meanwhile, with the memory of the slot.
bool WaitGraphs::exists(const Slot& slot) const {
    const auto graph = ids_.find(slot.graph);
    return graph != ids_.end() && graph->second == slot.id;
}

bool LocalDiagnosis::is_final(const WaitGraph& graph, const WaitGraph::Waits& waits,
                              std::chrono::milliseconds timeout) {
    // 1. Search again, and compare the verdict with the previous one.
    const auto now = Clock::now();
    const bool is_first = began_ == Clock::time_point{};
    if (is_first) {
        began_ = now;
        heartbeats_ = graph.heartbeats();
    }
    const WaitGraph::Verdict previous = std::exchange(verdict_, graph.find_late(waits, heartbeats_));
    if (is_first || !verdict_.names_the_same(previous)) unchanged_since_ = now;
    // 2. A verdict without stopped ranks is final once it has settled. Stopped ranks may only be slow, so they wait.
    const auto settling = std::clamp(timeout / 4, kLeastSettling, kMostSettling);
    const bool is_over = now - began_ >= kLongestInSettlings * settling;
    const WaitGraph::Verdict silent = silent_ranks(graph);
    if (silent.count == 0) return is_over || now - unchanged_since_ >= settling;
    if (is_over) verdict_ = silent;
    return is_over;
}

// The ranks of a deadlock that have no heartbeat since the diagnosis began: they are stopped.
WaitGraph::Verdict LocalDiagnosis::silent_ranks(const WaitGraph& graph) const {
    WaitGraph::Verdict silent;
    if (!verdict_.is_deadlock) return silent;
    const auto heartbeats = graph.heartbeats();
    for (const WaitGraph::Late& late : verdict_.entries()) {
        const auto rank = static_cast<std::size_t>(late.rank);
        if (heartbeats[rank] == heartbeats_[rank]) silent.add(late);
    }
    return silent;
}

}  // namespace dist_prims
