#include "router.h"

#include <algorithm>
#include <utility>

namespace dist_prims {

Router::RoutedRequest Router::send(int to, std::uint64_t number, const std::byte* data, std::size_t bytes,
                                   std::chrono::milliseconds timeout, Transport::Owner owner) {
    if (local_rank(to) < 0)
        return {nullptr, remote_->send(to, remote_->tags.data(number), data, bytes, timeout, std::move(owner))};
    const auto local_timeout = remote_ ? timeout + RemotePeers::kLocalMargin : timeout;
    return {p2p_.send(local_rank(to), PointToPoint::kCollectiveFlag | number, data, bytes, local_timeout, nullptr),
            nullptr};
}

Router::RoutedRequest Router::receive(int from, std::uint64_t number, std::byte* data, std::size_t bytes,
                                      std::chrono::milliseconds timeout, Transport::Owner owner) {
    if (local_rank(from) < 0)
        return {nullptr, remote_->receive(from, remote_->tags.data(number), data, bytes, timeout, std::move(owner))};
    const auto local_timeout = remote_ ? timeout + RemotePeers::kLocalMargin : timeout;
    return {p2p_.receive(local_rank(from), PointToPoint::kCollectiveFlag | number, data, bytes, local_timeout, nullptr),
            nullptr};
}

void Router::wait(const std::vector<RoutedRequest>& requests) {
    if (remote_ &&
        std::any_of(requests.begin(), requests.end(), [](const auto& each) { return each.local != nullptr; }))
        remote_->move_in_background();
    for (const RoutedRequest& request : requests) {
        if (!request.local) continue;
        p2p_.wait(request.local, std::chrono::milliseconds::max());
        if (request.local->error) std::rethrow_exception(request.local->error);
    }
    for (const RoutedRequest& request : requests) {
        if (request.remote) remote_->wait(request.remote);
    }
}

void Router::end() {
    p2p_.end();
    if (remote_) remote_->end();
}

}  // namespace dist_prims
