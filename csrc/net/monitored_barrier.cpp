#include "monitored_barrier.h"

#include <algorithm>

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::milliseconds kNeverAlone = 1h;  // the barrier times out, not its requests on this host

}  // namespace

void MonitoredBarrier::run(bool names_all) {
    const auto until = Clock::now() + limit_;
    const int size = static_cast<int>(local_ranks_.size());
    if (rank_ != 0) {
        if (!exchange(Direction::kSend, 0, until) || !exchange(Direction::kReceive, 0, until)) give_up({0});
        return;
    }
    std::vector<int> late;
    for (int peer = 1; peer < size && (late.empty() || names_all); ++peer) {
        if (!exchange(Direction::kReceive, peer, until)) late.push_back(peer);
    }
    if (!late.empty()) give_up(late);
    for (int peer = 1; peer < size; ++peer) {
        if (!exchange(Direction::kSend, peer, Clock::now() + limit_)) give_up({peer});
    }
}

// Returns false if the message has not been moved by `until`.
bool MonitoredBarrier::exchange(Direction direction, int peer, Clock::time_point until) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
    const int local_rank = local_ranks_[static_cast<std::size_t>(peer)];
    const bool sends = direction == Direction::kSend;
    std::byte* const nothing = nullptr;
    if (local_rank < 0) {
        const int tag = remote_.tags.barrier();
        const auto request =
            sends ? remote_.send(peer, tag, nothing, 0, limit_) : remote_.receive(peer, tag, nothing, 0, limit_);
        request->deadline = until;
        return remote_.wait_until_deadline(request);
    }
    constexpr PointToPoint::Tag kTag = PointToPoint::kBarrierTag;
    const auto request = sends ? p2p_.send(local_rank, kTag, nothing, 0, limit_ + kNeverAlone, nullptr)
                               : p2p_.receive(local_rank, kTag, nothing, 0, limit_ + kNeverAlone, nullptr);
    if (!p2p_.wait(request, std::max(left, 1ms))) return false;
    if (request->error) std::rethrow_exception(request->error);
    return true;
}

void MonitoredBarrier::give_up(const std::vector<int>& late) {
    std::string text = std::to_string(limit_.count()) + " ms in monitored_barrier: Rank " + std::to_string(rank_) +
                       " timed out in monitoredBarrier, no sign of rank ";
    for (const int each : late) text += (each == late.front() ? "" : ", ") + std::to_string(each);
    remote_.throw_late(late.front(), [&] { return text; });
}

}  // namespace dist_prims
