#include "monitored_barrier.h"

#include <algorithm>

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

// So that the barrier times out before its requests on this host.
constexpr std::chrono::milliseconds kRequestMargin = 1h;
constexpr PointToPoint::Tag kTag = PointToPoint::kBarrierTag;

std::string list(const std::vector<int>& ranks) {
    std::string found;
    for (const int rank : ranks) found += (found.empty() ? "" : ", ") + std::to_string(rank);
    return found;
}

}  // namespace

void MonitoredBarrier::run(bool names_all) {
    const auto until = Clock::now() + limit_;
    if (rank_ != 0) {
        if (!wait(send(0), until) || !wait(receive(0), until)) give_up(0, "");
        return;
    }
    std::vector<Request> receives(1);
    for (int peer = 1; peer < static_cast<int>(local_ranks_.size()); ++peer) receives.push_back(receive(peer));
    std::vector<int> late;
    for (std::size_t peer = 1; peer < receives.size() && (late.empty() || names_all); ++peer) {
        if (!wait(receives[peer], until)) late.push_back(static_cast<int>(peer));
    }
    if (!late.empty())
        give_up(late.front(), " (Rank 0 timed out in monitoredBarrier, no sign of rank " + list(late) + ")");
    release_all();
}

void MonitoredBarrier::release_all() const {
    std::vector<Request> sends(1);
    for (int peer = 1; peer < static_cast<int>(local_ranks_.size()); ++peer) sends.push_back(send(peer));
    for (std::size_t peer = 1; peer < sends.size(); ++peer) {
        if (!wait(sends[peer], Clock::now() + limit_)) give_up(static_cast<int>(peer), "");
    }
}

MonitoredBarrier::Request MonitoredBarrier::send(int peer) const {
    const std::byte* const nothing = nullptr;
    if (local_rank(peer) >= 0)
        return {p2p_.send(local_rank(peer), kTag, nothing, 0, limit_ + kRequestMargin, nullptr), {}};
    return {{}, remote_.send(peer, remote_.tags.barrier(), nothing, 0, limit_)};
}

MonitoredBarrier::Request MonitoredBarrier::receive(int peer) const {
    std::byte* const nothing = nullptr;
    if (local_rank(peer) >= 0)
        return {p2p_.receive(local_rank(peer), kTag, nothing, 0, limit_ + kRequestMargin, nullptr), {}};
    return {{}, remote_.receive(peer, remote_.tags.barrier(), nothing, 0, limit_)};
}

// Returns false if the message has not been moved by `until`.
bool MonitoredBarrier::wait(const Request& request, Clock::time_point until) const {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
    if (request.remote) {
        request.remote->deadline = until;
        return left > 0ms ? remote_.wait_until_deadline(request.remote)
                          : remote_.is_done_after_deadline(request.remote);
    }
    if (!p2p_.wait(request.local, std::max(left, 1ms))) return false;
    if (request.local->error) std::rethrow_exception(request.local->error);
    return true;
}

// Ends the group, and names the rank that blocks the awaited one.
void MonitoredBarrier::give_up(int awaited, const std::string& why) const {
    const std::string what = "monitored_barrier within " + std::to_string(limit_.count()) + " ms" + why;
    remote_.throw_late(awaited, [&] { return what; });
}

}  // namespace dist_prims
