// What plans do: the collectives of groups that span hosts, and an all_reduce whose schedule is pinned.
#include <cstring>

#include "backend.h"

namespace dist_prims {

void PrimsBackend::pin(std::vector<Planned> planned) {
    const std::lock_guard lock(plans_guard_);
    pins_.clear();
    for (Planned& each : planned) pins_.push_back(std::make_shared<const Planned>(std::move(each)));
}

std::string PrimsBackend::algorithm(std::uint64_t bytes) {
    const PlannedPtr found = planned(Collective::kAllReduce, bytes);
    return found ? found->name : "";
}

// The schedule for data of so many bytes; none if the board of one host does it. Its choice may ask Python.
PrimsBackend::PlannedPtr PrimsBackend::planned(Collective collective, std::uint64_t bytes, int root) {
    const std::lock_guard lock(plans_guard_);
    auto& chosen = chosen_[{collective, root}];
    for (const auto* known : {collective == Collective::kAllReduce ? &pins_ : &chosen, &chosen}) {
        for (const PlannedPtr& each : *known) {
            if (each->low <= bytes && bytes < each->high) return each;
        }
    }
    if (!span_) return nullptr;
    return chosen.emplace_back(std::make_shared<const Planned>(setup_.choose(name_of(collective), bytes, root)));
}

// Return when all ranks are about to make this call; raise Mismatch on all of them if one is not.
void PrimsBackend::agree(const Call& call, Milliseconds timeout) {
    if (span_) return span_->agree(call, timeout);
    room_->board.open(call, timeout);
    dist_prims::barrier(room_->board);
}

void PrimsBackend::follow(const Planned& planned, const Call& call, const Field& field, Milliseconds timeout) {
    execute(planned.plan, span_ ? span_->route : *route_, call.dtype, call.op, field, planned.segments, timeout);
}

// Every rank sends each its block, all at once.
void PrimsBackend::exchange(const Call& call, const Blocks& in, const Counts& outgoing, const Places& out,
                            const Counts& incoming, Milliseconds timeout) {
    agree(call, timeout);
    compare_lengths(call, outgoing, incoming, timeout);
    Route& route = span_->route;
    const std::uint64_t number = route.next();
    std::vector<Route::Letter> letters;
    try {
        for (int step = 1; step < size_; ++step) {  // no rank is the first that all send to
            const int to = (rank_ + step) % size_, from = (rank_ + size_ - step) % size_;
            const auto sent = static_cast<std::size_t>(to), got = static_cast<std::size_t>(from);
            if (incoming[got]) letters.push_back(route.receive(from, number, out[got], incoming[got], timeout));
            if (outgoing[sent]) letters.push_back(route.send(to, number, in[sent], outgoing[sent], timeout));
        }
        route.wait(letters);
    } catch (...) {
        route.end();
        throw;
    }
    const auto own = static_cast<std::size_t>(rank_);
    if (outgoing[own] && out[own] != in[own]) std::memcpy(out[own], in[own], outgoing[own]);
}

// All ranks learn how much each sends to whom and expects from whom, and raise Mismatch where the two differ.
void PrimsBackend::compare_lengths(const Call& call, const Counts& outgoing, const Counts& incoming,
                                   Milliseconds timeout) {
    const auto size = static_cast<std::size_t>(size_), row = 2 * size;
    std::vector<std::uint64_t> lists(size * row);
    std::uint64_t* const mine = &lists[static_cast<std::size_t>(rank_) * row];
    std::copy(incoming.begin(), incoming.end(), std::copy(outgoing.begin(), outgoing.end(), mine));
    const PlannedPtr plan = planned(Collective::kAllGather, lists.size() * sizeof(std::uint64_t));
    Call lengths;
    lengths.dtype = DType::kUInt64;
    follow(*plan, lengths, {reinterpret_cast<std::byte*>(lists.data()), lists.size(), Counts(size, row)}, timeout);
    for (std::size_t from = 0; from < size; ++from) {
        for (std::size_t to = 0; to < size; ++to)
            must_match(rank_, name_of(call.collective), static_cast<int>(from), lists[from * row + to],
                       static_cast<int>(to), lists[to * row + size + from]);
    }
}

}  // namespace dist_prims
