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

constexpr std::size_t kLine = 64;
constexpr std::chrono::milliseconds kLeastSettling = 20ms,
                                    kMostSettling = 250ms;  // a blocked rank heartbeats every 10 ms
constexpr int kLongestInSettlings = 4;
constexpr auto kBetweenLooksElsewhere = 100ms;
constexpr auto kFailureCounts = 5s;        // in another group: ranks that began to wait later time out later
constexpr std::size_t kMostElsewhere = 2;  // late processes that are published in other groups

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

struct WaitGraph::RankEntry {
    alignas(kLine) std::atomic<std::uint64_t> slots[kSlots];  // zero: free
    std::atomic<std::uint64_t> heartbeats;
    alignas(kLine) std::atomic<Clock::rep> failed_elsewhere;  // when a wait in another group ended with an error
    alignas(kLine) Verdict verdict;  // ordered by the notice, which is written after it and read before it
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
    return std::any_of(ranks, ranks + std::min<std::size_t>(count, kMost),
                       [rank](const Late& each) { return each.rank == rank; });
}

bool WaitGraph::Verdict::names_the_same(const Verdict& other) const {
    return count == other.count && is_deadlock == other.is_deadlock &&
           std::equal(ranks, ranks + std::min<std::size_t>(count, kMost), other.ranks,
                      [](const Late& one, const Late& two) { return one.rank == two.rank; });
}

// What a wait has published in the graphs of other groups.
struct WaitGraph::Published::Elsewhere {
    std::vector<std::uint64_t> since;  // heartbeats when the wait became long
    Clock::time_point next_look{};
    std::vector<int> pids;
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

void WaitGraph::Published::publish_elsewhere(const Wait& wait) {
    if (!elsewhere_) elsewhere_ = std::make_unique<Elsewhere>(Elsewhere{graph_.heartbeats(), {}, {}, {}});
    WaitGraphs& groups = *graph_.groups_;
    groups.heartbeat(graph_);
    if (Clock::now() < elsewhere_->next_look) return;
    elsewhere_->next_look = Clock::now() + kBetweenLooksElsewhere;
    const Verdict verdict = graph_.find_late({wait}, elsewhere_->since);
    std::vector<int> pids;
    for (std::size_t each = 0; each < std::min<std::size_t>(verdict.count, kMostElsewhere); ++each) {
        const int rank = verdict.ranks[each].rank, pid = rank < 0 ? -rank : graph_.pid_of_(rank);
        if (pid && rank != graph_.rank_) pids.push_back(pid);
    }
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

int WaitGraph::rank_of(int pid) const {
    for (int rank = 0; pid_of_ && rank < size_; ++rank) {
        if (pid_of_(rank) == pid) return rank;
    }
    return -pid;
}

WaitGraph::Waits WaitGraph::published_waits(int rank) const {
    Waits found;
    for (const auto& slot : entry(rank).slots) {
        const Wait wait = unpacked(slot.load());
        if (wait.kind != WaitKind::kNone) found.push_back(wait);
    }
    return found;
}

// The ranks that are furthest behind, if `rank` is ahead of them. A rank between them and `rank` is left out: it waits
// for them as well.
WaitGraph::Nodes WaitGraph::ranks_behind(int rank) const {
    std::vector<std::uint64_t> phases;
    for (int peer = 0; peer < size_; ++peer) phases.push_back(position_(peer).phase);
    const std::uint64_t least = *std::min_element(phases.begin(), phases.end(), precedes);
    Nodes found;
    if (least == phases[static_cast<std::size_t>(rank)]) return found;
    for (int peer = 0; peer < size_; ++peer) {
        if (phases[static_cast<std::size_t>(peer)] == least) found.push_back({peer, true});
    }
    return found;
}

// A receive from any rank waits for all of them: it is blocked as long as none of them sends.
WaitGraph::Nodes WaitGraph::awaited_nodes(int rank, const Wait& wait) const {
    if (wait.peer != kAnyone) return {{wait.peer, wait.in_collective}};
    Nodes found;
    for (int peer = 0; peer < size_; ++peer) {
        if (peer != rank) found.push_back({peer, wait.in_collective});
    }
    return found;
}

void WaitGraph::add_message_edges(int rank, bool in_collective, Nodes& found) const {
    for (const Wait& wait : published_waits(rank)) {
        const bool is_message = wait.kind == WaitKind::kReceive || wait.kind == WaitKind::kSend;
        if (!is_message || wait.in_collective != in_collective || !is_blocked_(rank, wait)) continue;
        for (const Node& target : awaited_nodes(rank, wait)) found.push_back(target);
    }
}

void WaitGraph::add_elsewhere_edges(int rank, const std::vector<std::uint64_t>& since, Nodes& found) const {
    if (pid_of_ && pid_of_(rank) == 0) return;  // its pids are of another PID namespace
    const RankEntry& of = entry(rank);
    const auto now = Clock::now().time_since_epoch().count();
    const bool has_failed = now - of.failed_elsewhere.load() < Clock::duration(kFailureCounts).count();
    if (of.heartbeats.load(std::memory_order_relaxed) == since[static_cast<std::size_t>(rank)] && !has_failed) return;
    for (const Wait& wait : published_waits(rank)) {
        if (wait.kind == WaitKind::kElsewhere) found.push_back({rank_of(wait.peer), false});
    }
}

WaitGraph::Nodes WaitGraph::edges_of_collectives(int rank) const {
    Nodes found = ranks_behind(rank);
    if (found.empty()) add_message_edges(rank, true, found);
    return found;
}

// A rank whose collectives wait for nothing has not made the call: the result then depends on what its program waits
// for.
WaitGraph::Nodes WaitGraph::edges_from(const Node& node, const std::vector<std::uint64_t>& since) const {
    const auto published = published_waits(node.rank);
    const bool is_in_collective = std::any_of(published.begin(), published.end(), [](const Wait& wait) {
        return wait.kind == WaitKind::kCollective || (wait.in_collective && !wait.in_background);
    });
    Nodes found;
    if (node.is_collectives || is_in_collective) found = edges_of_collectives(node.rank);
    if (node.is_collectives && !found.empty()) return found;
    add_message_edges(node.rank, false, found);
    add_elsewhere_edges(node.rank, since, found);
    return found;
}

// A depth-first search through the graph.
class WaitGraph::Search {
public:
    Search(const WaitGraph& graph, const std::vector<std::uint64_t>& since)
        : graph_(graph), since_(since), visited_(2 * static_cast<std::size_t>(graph.size_)) {}

    void visit(const Node& node) {
        if (node.rank < 0) return add_late({node.rank, LateState::kIsInNoCall, 0});  // a process of another group
        if (std::exchange(visited_[2 * static_cast<std::size_t>(node.rank) + node.is_collectives], char{1}))
            return note_deadlock(node);
        path_.push_back(node);
        const Nodes next = graph_.edges_from(node, since_);
        for (const Node& each : next) visit(each);
        if (next.empty()) add_late(graph_.describe(node.rank, node.is_collectives));
        path_.pop_back();
    }

    const Verdict& verdict() const { return late_.count ? late_ : deadlock_; }

private:
    void add_late(const Late& late) {
        if (!late_.has(late.rank)) late_.add(late);
    }

    void note_deadlock(const Node& node) {
        auto each = std::find_if(path_.begin(), path_.end(), [&](const Node& other) {
            return other.rank == node.rank && other.is_collectives == node.is_collectives;
        });
        if (deadlock_.count || each == path_.end()) return;
        deadlock_.is_deadlock = true;
        for (; each != path_.end(); ++each) {
            if (!deadlock_.has(each->rank)) deadlock_.add(graph_.describe(each->rank, each->is_collectives));
        }
    }

    const WaitGraph& graph_;
    const std::vector<std::uint64_t>& since_;
    Nodes path_;
    std::vector<char> visited_;  // by node
    Verdict late_, deadlock_;
};

WaitGraph::Verdict WaitGraph::find_late(const Waits& waits, const std::vector<std::uint64_t>& since) const {
    Search search(*this, since);
    for (const Wait& wait : waits) {
        const Nodes first =
            wait.kind == WaitKind::kCollective ? edges_of_collectives(rank_) : awaited_nodes(rank_, wait);
        for (const Node& each : first) search.visit(each);
    }
    return search.verdict();
}

std::vector<std::uint64_t> WaitGraph::heartbeats() const {
    std::vector<std::uint64_t> found;
    for (int rank = 0; rank < size_; ++rank) found.push_back(entry(rank).heartbeats.load(std::memory_order_relaxed));
    return found;
}

WaitGraph::Late WaitGraph::describe(int rank, bool in_collective) const {
    const Position here = position_(rank);
    Position furthest = here;
    std::uint64_t last_phase = here.phase;
    for (int peer = 0; peer < size_; ++peer) {
        const Position there = position_(peer);
        if (precedes(furthest.calls, there.calls)) furthest = there;
        last_phase = std::max(last_phase, there.phase, precedes);
    }
    if (precedes(here.calls, furthest.calls)) return {rank, LateState::kHasNotMadeCall, furthest.number};
    const bool is_in_call = in_collective || precedes(here.phase, last_phase);
    return {rank, is_in_call ? LateState::kIsInCall : LateState::kIsInNoCall, here.number};
}

std::shared_ptr<WaitGraphs> WaitGraphs::of_this_process() {
    struct Own {
        int process = this_process();
        std::shared_ptr<WaitGraphs> graphs = std::make_shared<WaitGraphs>();
    };
    static std::atomic<Own*> current{
        nullptr};  // never destroyed; without a lock, which a forked child might find taken
    Own* found = current.load(std::memory_order_acquire);
    if (found && found->process == this_process()) return found->graphs;
    auto made = std::make_unique<Own>();
    return (current.compare_exchange_strong(found, made.get()) ? made.release() : found)->graphs;
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

// The graph may have been destroyed meanwhile, with its memory.
bool WaitGraphs::exists(const Slot& slot) const {
    const auto found = ids_.find(slot.graph);
    return found != ids_.end() && found->second == slot.id;
}

bool LocalDiagnosis::is_final(const WaitGraph& graph, const WaitGraph::Waits& waits,
                              std::chrono::milliseconds timeout) {
    const auto now = Clock::now();
    const auto settling = std::clamp(timeout / 4, kLeastSettling, kMostSettling);
    const bool is_first = began_ == Clock::time_point{};
    if (is_first) heartbeats_ = graph.heartbeats();
    const WaitGraph::Verdict before = std::exchange(verdict_, graph.find_late(waits, heartbeats_));
    if (is_first) {
        began_ = unchanged_since_ = now;
    } else if (!verdict_.names_the_same(before)) {
        unchanged_since_ = now;
    }
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
    for (std::size_t each = 0; each < std::min<std::size_t>(verdict_.count, WaitGraph::Verdict::kMost); ++each) {
        const auto rank = static_cast<std::size_t>(verdict_.ranks[each].rank);
        if (heartbeats[rank] == heartbeats_[rank]) silent.add(verdict_.ranks[each]);
    }
    return silent;
}

}  // namespace dist_prims
