#include "monitored_barrier.h"

#include <algorithm>
#include <string>

#include "router.h"

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

// So that the barrier times out before its requests on this host.
constexpr std::chrono::milliseconds kRequestMargin = 1h;
constexpr PointToPoint::Tag kTag = PointToPoint::kBarrierTag;

// The messages of one barrier.
class BarrierMessages {
public:
    using Request = Router::RoutedRequest;

    BarrierMessages(RemotePeers& remote, PointToPoint& p2p, const std::vector<int>& local_ranks,
                    std::chrono::milliseconds limit)
        : remote_(remote), p2p_(p2p), local_ranks_(local_ranks), limit_(limit) {}

    Request send(int peer) const {
        const std::byte* const nothing = nullptr;
        if (local_rank(peer) >= 0)
            return {p2p_.send(local_rank(peer), kTag, nothing, 0, limit_ + kRequestMargin, nullptr), {}};
        return {{}, remote_.send(peer, remote_.tags.barrier(), nothing, 0, limit_)};
    }
    Request receive(int peer) const {
        std::byte* const nothing = nullptr;
        if (local_rank(peer) >= 0)
            return {p2p_.receive(local_rank(peer), kTag, nothing, 0, limit_ + kRequestMargin, nullptr), {}};
        return {{}, remote_.receive(peer, remote_.tags.barrier(), nothing, 0, limit_)};
    }
    // Returns false if the message is not done by `until`. If that has passed, only checks whether it is done.
    bool wait(const Request& request, Clock::time_point until) const {
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
    // Ends the group, and names the rank that blocks `awaited`.
    [[noreturn]] void throw_late(int awaited, const std::string& why = "") const {
        remote_.throw_late(awaited,
                           [&] { return "monitored_barrier within " + std::to_string(limit_.count()) + " ms" + why; });
    }

private:
    int local_rank(int peer) const { return local_ranks_[static_cast<std::size_t>(peer)]; }

    RemotePeers& remote_;
    PointToPoint& p2p_;
    const std::vector<int>& local_ranks_;
    const std::chrono::milliseconds limit_;
};

}  // namespace

void monitored_barrier(RemotePeers& remote, PointToPoint& p2p, const std::vector<int>& local_ranks, int rank,
                       std::chrono::milliseconds limit, bool names_all) {
    const BarrierMessages messages(remote, p2p, local_ranks, limit);
    const auto until = Clock::now() + limit;
    // 1. A rank other than 0.
    if (rank != 0) {
        if (!messages.wait(messages.send(0), until) || !messages.wait(messages.receive(0), until))
            messages.throw_late(0);
        return;
    }
    // 2. Rank 0 posts all receives at once, and waits for one after the other.
    const int size = static_cast<int>(local_ranks.size());
    std::vector<BarrierMessages::Request> receives, sends;
    for (int peer = 1; peer < size; ++peer) receives.push_back(messages.receive(peer));
    int first_late = 0;
    std::string late;
    for (int peer = 1; peer < size && (first_late == 0 || names_all); ++peer) {
        if (messages.wait(receives[static_cast<std::size_t>(peer - 1)], until)) continue;
        if (first_late == 0) first_late = peer;
        late += (late.empty() ? "" : ", ") + std::to_string(peer);
    }
    if (first_late)
        messages.throw_late(first_late, " (Rank 0 timed out in monitoredBarrier, no sign of rank " + late + ")");
    // 3. All ranks are in the barrier: release them.
    for (int peer = 1; peer < size; ++peer) sends.push_back(messages.send(peer));
    for (int peer = 1; peer < size; ++peer) {
        if (!messages.wait(sends[static_cast<std::size_t>(peer - 1)], Clock::now() + limit)) messages.throw_late(peer);
    }
}

}  // namespace dist_prims
