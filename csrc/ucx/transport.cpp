#include "transport.h"

#include <poll.h>

#include <string>
#include <utility>

#include "../tcp/lane_request.h"

namespace dist_prims::ucx {

UcxTransport::UcxTransport(std::unique_ptr<Worker> worker, Connections connections)
    : tags_(TcpTransport::kLargestTag),
      is_watched_(connections.addresses.size()),
      lane_(std::move(worker), std::move(connections.addresses), connections.rank, connections.tcp.key,
            connections.tcp.polls),
      control_(
          std::move(connections.tcp), connections.rank, [this](const std::string& reason) { lane_.close(reason); },
          [this](int peer, const Failure& failure) { lane_.on_gone(peer, failure); }) {
    mover_.start("rank " + std::to_string(connections.rank) + ": the thread of the transport over UCX",
                 [this] { run(); });
}

UcxTransport::~UcxTransport() {
    stop();
}

void UcxTransport::stop() {
    mover_.stop();
    lane_.close("the transport has been closed");
}

// The end of a rank with which this one exchanges messages must be noticed.
void UcxTransport::watch(int peer) {
    auto& is_watched = is_watched_[static_cast<std::size_t>(peer)];
    if (!is_watched.load(std::memory_order_relaxed) && !is_watched.exchange(true)) control_.watch(peer);
}

Transport::Handle UcxTransport::send(int to, int tag, const std::byte* data, std::size_t bytes, Owner owner) {
    if (tags_.is_control(tag)) return control_.send(to, tag, data, bytes, std::move(owner));
    watch(to);
    auto* const place = const_cast<std::byte*>(data);  // a send only reads it
    const auto message = std::make_shared<Message>(Message{&lane_, true, to, tag, place, bytes, std::move(owner)});
    lane_.send(message);
    return std::make_unique<LaneRequest<Lane, MessagePtr>>(control_, lane_, message);
}

Transport::Handle UcxTransport::receive(int from, int tag, std::byte* data, std::size_t bytes, Owner owner) {
    if (tags_.is_control(tag)) return control_.receive(from, tag, data, bytes, std::move(owner));
    if (from != kAnyone) watch(from);
    const auto message = std::make_shared<Message>(
        Message{&lane_, false, from, tag, data, bytes, std::move(owner), tags_.may_be_shorter(tag)});
    lane_.receive(message);
    return std::make_unique<LaneRequest<Lane, MessagePtr>>(control_, lane_, message);
}

Transport::Handle UcxTransport::receive_from_any(int tag, std::byte* data, std::size_t bytes, Owner owner,
                                                 const ClaimPtr& claim) {
    const auto message = std::make_shared<Message>(Message{&lane_, false, kAnyone, tag, data, bytes, std::move(owner)});
    message->claim = claim;
    lane_.receive(message);
    return std::make_unique<LaneRequest<Lane, MessagePtr>>(control_, lane_, message);
}

void UcxTransport::leave() {
    lane_.leave();
    control_.leave();
}

void UcxTransport::move_in_background() {
    if (lane_.is_loaded()) mover_.ask();
}

void UcxTransport::run() {
    while (!mover_.is_stopping()) {
        const bool moves = mover_.moves();
        const bool is_quiet = !moves || lane_.progress();
        pollfd watched[] = {{mover_.descriptor(), POLLIN, 0}, {moves ? lane_.descriptor() : -1, POLLIN, 0}};
        const auto sleep = !is_quiet ? std::chrono::milliseconds(0)
                           : moves   ? lane_.longest_sleep()
                                     : mover_.until_look();
        ::poll(watched, std::size(watched), static_cast<int>(sleep.count()));
        mover_.look(lane_, watched[0].revents != 0);
    }
}

}  // namespace dist_prims::ucx
