#include "inbox.h"

#include <algorithm>
#include <cstring>

namespace dist_prims {
namespace {

template <typename Value>
Value take_front(std::map<std::pair<int, int>, std::deque<Value>>& queues,
                 typename std::map<std::pair<int, int>, std::deque<Value>>::iterator queue) {
    Value front = std::move(queue->second.front());
    queue->second.pop_front();
    if (queue->second.empty()) queues.erase(queue);
    return front;
}

void fail_message(TcpMessage& message, const Failure& error) {
    if (!message.is_done && message.error.empty()) message.error = error;
}

// Whether the receive may take a message of this length. If not, it fails.
bool accepts(TcpMessage& receive, int from, std::size_t bytes) {
    if (bytes == receive.bytes || (receive.may_be_shorter && bytes < receive.bytes)) return true;
    receive.has_other_length = true;
    fail_message(receive, {"rank " + std::to_string(from) + " has sent a message of " + std::to_string(bytes) +
                           " bytes, and the receive is for " + std::to_string(receive.bytes)});
    return false;
}

}  // namespace

// Returns the first receive for a message; null if there is none.
TcpMessagePtr Inbox::take_receive(int from, int tag) {
    for (const int sender : {from, Transport::kAnyone}) {
        const Key key{sender, tag};
        for (auto queue = posted_.find(key); queue != posted_.end(); queue = posted_.find(key)) {
            TcpMessagePtr receive = take_front(posted_, queue);
            expected_ -= receive->bytes;
            if (take(receive->claim)) return receive;
        }
    }
    return nullptr;
}

// Whether a message from this rank that has not begun is needed.
bool Inbox::is_needed(int from) const {
    return std::any_of(posted_.begin(), posted_.end(), [&](const auto& queue) {
        const int sender = queue.first.first;
        return (sender == from || sender == Transport::kAnyone) &&
               std::any_of(queue.second.begin(), queue.second.end(),
                           [](const auto& each) { return each->is_awaited || each->reads_ahead; });
    });
}

ArrivalPtr Inbox::begin(int from, int tag, std::size_t bytes) {
    ArrivalPtr arrival;
    if (TcpMessagePtr receive = take_receive(from, tag)) {
        arrival = std::make_shared<Arrival>(Arrival{from, tag, bytes, receive->data});
        if (accepts(*receive, from, bytes)) arrival->receive = std::move(receive);
    } else if (bytes <= kSmall || is_needed(from)) {
        arrival = std::make_shared<Arrival>(Arrival{from, tag, bytes, nullptr});
        unexpected_[{from, tag}].push_back(arrival);
    } else {
        return nullptr;
    }
    if (!arrival->receive) {
        arrival->buffer.reset(new std::byte[std::max<std::size_t>(bytes, 1)]);
        arrival->data = arrival->buffer.get();
    }
    filling_.push_back(arrival);
    return arrival;
}

void Inbox::finish(const TcpMessagePtr& receive, const Arrival& arrival) {
    if (!accepts(*receive, arrival.from, arrival.bytes)) return;
    if (arrival.bytes && receive->data != arrival.data) std::memcpy(receive->data, arrival.data, arrival.bytes);
    receive->peer = arrival.from;
    receive->is_done = true;
}

void Inbox::complete(Arrival& arrival) {
    filling_.remove_if([&](const ArrivalPtr& each) { return each.get() == &arrival; });
    arrival.is_complete = true;
    if (const TcpMessagePtr& receive = arrival.receive ? arrival.receive : arrival.claimed_by) finish(receive, arrival);
}

void Inbox::post(const TcpMessagePtr& receive) {
    const auto is_meant = [&](const auto& each) {
        return each.first.second == receive->tag &&
               (receive->peer == Transport::kAnyone || each.first.first == receive->peer);
    };
    const auto queue = std::find_if(unexpected_.begin(), unexpected_.end(), is_meant);
    if (queue == unexpected_.end() || !take(receive->claim)) {
        posted_[{receive->peer, receive->tag}].push_back(receive);
        expected_ += receive->bytes;
        return;
    }
    const ArrivalPtr arrival = take_front(unexpected_, queue);
    if (arrival->is_complete)
        finish(receive, *arrival);
    else
        arrival->claimed_by = receive;
}

void Inbox::withdraw(const TcpMessagePtr& receive) {
    for (auto queue = posted_.begin(); queue != posted_.end();) {
        expected_ -= std::erase(queue->second, receive) * receive->bytes;
        queue = queue->second.empty() ? posted_.erase(queue) : std::next(queue);
    }
    for (const ArrivalPtr& arrival : filling_) {
        if (arrival->claimed_by == receive) arrival->claimed_by = nullptr;
        if (arrival->receive != receive) continue;
        arrival->receive = nullptr;  // the rest of the message is dropped
        arrival->buffer.reset(new std::byte[arrival->bytes]);
        arrival->data = arrival->buffer.get();
    }
}

void Inbox::fail(int from, const Failure& error) {
    for (auto queue = posted_.begin(); queue != posted_.end();) {
        const bool is_meant = queue->first.first == from;
        for (const TcpMessagePtr& each : queue->second) {
            if (!is_meant) break;
            fail_message(*each, error);
            expected_ -= each->bytes;
        }
        queue = is_meant ? posted_.erase(queue) : std::next(queue);
    }
    for (auto queue = unexpected_.begin(); queue != unexpected_.end();) {
        if (queue->first.first == from)
            std::erase_if(queue->second, [](const ArrivalPtr& arrival) { return !arrival->is_complete; });
        queue = queue->second.empty() ? unexpected_.erase(queue) : std::next(queue);
    }
    std::erase_if(filling_, [&](const ArrivalPtr& arrival) {
        if (arrival->from != from) return false;
        for (const TcpMessagePtr& each : {arrival->receive, arrival->claimed_by}) {
            if (each) fail_message(*each, error);
        }
        return true;
    });
}

void Inbox::fail_all(const Failure& error) {
    for (const auto& [key, queue] : posted_) {
        for (const TcpMessagePtr& each : queue) fail_message(*each, error);
    }
    for (const ArrivalPtr& arrival : filling_) {
        for (const TcpMessagePtr& each : {arrival->receive, arrival->claimed_by}) {
            if (each) fail_message(*each, error);
        }
    }
    posted_.clear();
    filling_.clear();
    expected_ = 0;
}

}  // namespace dist_prims
