#include "slot_exchange.h"

#include <algorithm>
#include <utility>

#include "../common/counter_order.h"
#include "../common/thread.h"
#include "../common/trace.h"
#include "wait_policy.h"

namespace dist_prims {
namespace {

// Whether the calls name the same algorithm with different steps: names end with '#' and a fingerprint of the steps.
bool differ_in_steps(const Call& one, const Call& other) {
    const std::string name = one.algorithm.data(), other_name = other.algorithm.data();
    const std::size_t mark = name.rfind('#');
    return mark != std::string::npos && mark == other_name.rfind('#') && name != other_name &&
           name.compare(0, mark, other_name, 0, mark) == 0;
}

}  // namespace

// What a rank writes and the others read.
struct SlotExchange::PhaseEntry {
    alignas(kCacheLine) std::atomic<std::uint64_t> phase;
    alignas(kCacheLine) Call call[2];  // by phase, like the slots
    // For the wait-for graph: how many calls were opened, and the number of the last call, which is stored first.
    std::atomic<std::uint64_t> calls, number;
};

std::size_t SlotExchange::slots_begin(int size, int rank, std::size_t capacity) {
    return static_cast<std::size_t>(size) * sizeof(PhaseEntry) +
           2 * static_cast<std::size_t>(rank) * round_up_to_line(capacity);
}

void SlotExchange::set_counters(std::byte* place, int size, std::uint64_t value) {
    for (int rank = 0; rank < size; ++rank) {
        PhaseEntry& entry = reinterpret_cast<PhaseEntry*>(place)[rank];
        entry.phase.store(value);
        entry.calls.store(value);
    }
}

SlotExchange::SlotExchange(std::shared_ptr<const Mapping> memory, std::byte* place, Membership& membership,
                           std::size_t capacity)
    : memory_(std::move(memory)), place_(place), membership_(membership), capacity_(round_up_to_line(capacity)) {
    phase_ = entry(rank()).phase.load();
    calls_ = entry(rank()).calls.load();
    membership.wait_graph().position_by(
        [entries = reinterpret_cast<const PhaseEntry*>(place)](int rank) -> WaitGraph::Position {
            const PhaseEntry& entry = entries[rank];
            return {entry.phase.load(), entry.calls.load(std::memory_order_acquire),
                    entry.number.load(std::memory_order_relaxed)};
        });
}

SlotExchange::PhaseEntry& SlotExchange::entry(int rank) const {
    return reinterpret_cast<PhaseEntry*>(place_)[rank];
}

std::byte* SlotExchange::slot(int rank, std::uint64_t phase) const {
    return place_ + slots_begin(size(), rank, capacity_) + (phase & 1) * capacity_;
}

const Call& SlotExchange::call(int rank) const {
    return entry(rank).call[phase_ & 1];
}

void SlotExchange::open(const Call& call, std::chrono::milliseconds timeout, bool compares) {
    call_ = call;
    timeout_ = timeout;
    deadline_ = Clock::time_point{};
    compares_ = compares;
    check_abort();
    PhaseEntry& own = entry(rank());
    own.call[(phase_ + 1) & 1] = call;
    own.number.store(call.sequence, std::memory_order_relaxed);
    own.calls.store(++calls_, std::memory_order_release);
}

bool SlotExchange::is_behind(int rank) const {
    return precedes(entry(rank).phase.load(), phase_);
}

int SlotExchange::first_behind() const {
    for (int peer = 0; peer < size(); ++peer) {
        if (is_behind(peer)) return peer;
    }
    return -1;
}

void SlotExchange::phase() {
    // 1. Post.
    ++phase_;
    membership_.note_core();
    entry(rank()).phase.store(phase_);
    // 2. Wait for the other ranks. The last rank to post wakes the sleeping ranks instead.
    if (const int peer = first_behind(); peer >= 0) {
        wait_for_all(peer);
    } else {
        for (int peer = 0; peer < size(); ++peer) membership_.wake(peer);
    }
    move_trace_step(1);
    // 3. The first phase of a call compares the calls.
    if (std::exchange(compares_, false)) {
        if (const int peer = differing_rank(); peer >= 0)
            throw_mismatch(membership_.own_name(), 0, call(0), peer, call(peer));
    }
}

// `first` is the first rank that was behind; it may have posted since.
// Not inlined in phase(), which is faster without the objects that a wait needs.
void SlotExchange::wait_for_all(int first) {
    WaitPolicy wait_policy(membership_);
    std::optional<LongWait> long_wait;
    TraceSpan span(TraceKind::kWait, 0, membership_.group_rank(first));
    for (int peer = first; peer < size(); ++peer) {
        if (is_behind(peer)) span.set_peer(membership_.group_rank(peer));  // the last one is probably the latest rank
        while (is_behind(peer)) {
            const bool shares_core = membership_.shares_core(peer, [this](int rank) { return is_behind(rank); });
            const bool is_long = wait_policy.wait(shares_core, [this] { return !any_is_behind(); });
            if (is_long && any_is_behind()) check_failures(long_wait);
            membership_.note_core();
        }
    }
}

std::uint64_t SlotExchange::longest() const {
    std::uint64_t most = 0;
    for (int peer = 0; peer < size(); ++peer) most = std::max(most, call(peer).longest);
    return most;
}

int SlotExchange::shared_tensor_count() const {
    int count = 0;
    for (int peer = 0; peer < size(); ++peer) count += call(peer).tensor_ref.is_shared();
    return count;
}

int SlotExchange::differing_rank() const {
    for (int peer = 1; peer < size(); ++peer) {
        if (!call(0).agrees_with(call(peer))) return peer;
    }
    return -1;
}

void throw_mismatch(const std::string& own_name, int first, const Call& first_call, int second,
                    const Call& second_call) {
    const auto text = [](int rank, const Call& call) {
        return "ank " + std::to_string(rank) + " calls " + call.text();  // after "R" or "r"
    };
    const char* const remedy =
        differ_in_steps(first_call, second_call)
            ? "The ranks have registered different steps under this name, as the fingerprints after the # show; "
              "register the same function on every rank"
            : "Every rank of a group must make the same calls in the same order with the same arguments";
    throw CommError(CommError::Kind::kMismatch, own_name + ": ranks disagree, no data was touched. R" +
                                                    text(first, first_call) + "; r" + text(second, second_call) + ". " +
                                                    remedy);
}

// Called at intervals by a wait that is long. Throws if a rank that is behind has failed, or after the timeout.
void SlotExchange::check_failures(std::optional<LongWait>& long_wait) {
    // 1. Publish the wait; not on a thread of the queue, because the program of this rank continues then.
    constexpr WaitGraph::Wait wait{WaitGraph::WaitKind::kCollective};
    const auto now = Clock::now();
    if (deadline_ == Clock::time_point{}) deadline_ = now + timeout_;
    if (!long_wait) long_wait.emplace(membership_.wait_graph());
    if (!in_background) long_wait->published.set(wait);
    // 2. Failures of other ranks.
    membership_.check_failures([this](int peer) { return is_behind(peer); }, [this] { return call_.text(); });
    // 3. The timeout. Each phase has a diagnosis of its own, so in a call of many phases none may become final.
    if (now <= deadline_) return;
    const bool is_final = membership_.is_final(long_wait->diagnosis, {wait}, timeout_);
    const bool is_over = now > deadline_ + LocalDiagnosis::kLongest;
    if (!(is_final || is_over) || !any_is_behind()) return;
    const std::string what = std::to_string(timeout_.count()) + " ms in " + call_.text();
    membership_.throw_timeout(membership_.spans_hosts() ? what + ": " + late_text() : what,
                              long_wait->diagnosis.verdict());
}

// The ranks that are behind, for the error of a group that spans hosts.
std::string SlotExchange::late_text() const {
    std::string text;
    for (int peer = 0; peer < size(); ++peer) {
        if (is_behind(peer))
            text += (text.empty() ? "no sign of rank " : ", ") + std::to_string(membership_.group_rank(peer));
    }
    return text;
}

}  // namespace dist_prims
