#include "inbox.h"

#include <algorithm>
#include <cstring>

namespace dist_prims {
namespace {

// Takes the first value of a queue, and removes the queue if it is then empty.
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

// Whether the receive may take a message of this length. If not, the receive fails.
bool accepts(TcpMessage& receive, int from, std::size_t bytes) {
    if (bytes == receive.bytes || (receive.may_be_shorter && bytes < receive.bytes)) return true;
    receive.has_other_length = true;
    fail_message(receive, {"rank " + std::to_string(from) + " has sent a message of " + std::to_string(bytes) +
                           " bytes, and the receive is for " + std::to_string(receive.bytes)});
    return false;
}

}  // namespace

// Removes and returns the first receive for a message, unless its claim has been taken elsewhere; null: there is none.
TcpMessagePtr Inbox::take_receive(int from, int tag) {
    for (const int sender : {from, Transport::kAnyone}) {
        const Key key{sender, tag};
        for (auto queue = posted_.find(key); queue != posted_.end(); queue = posted_.find(key)) {
            TcpMessagePtr receive = take_front(posted_, queue);
            expected_ -= receive->bytes;
            if (take_claim(receive->claim)) return receive;
        }
    }
    return nullptr;
}

// Whether a later message from this rank is needed, so that the next one must be read even if it has no receive.
bool Inbox::is_needed(int from) const {
    return std::any_of(posted_.begin(), posted_.end(), [&](const auto& queue) {
        const int sender = queue.first.first;
        return (sender == from || sender == Transport::kAnyone) &&
               std::any_of(queue.second.begin(), queue.second.end(),
                           [](const auto& receive) { return receive->is_awaited || receive->reads_ahead; });
    });
}

ArrivalPtr Inbox::begin(int from, int tag, std::size_t bytes) {
    // 1. Find where the message goes. A receive for another length fails, and the message is read into a buffer.
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
    // 2. Without a receive it needs a buffer.
    if (!arrival->receive) {
        arrival->buffer.reset(new std::byte[std::max<std::size_t>(bytes, 1)]);
        arrival->data = arrival->buffer.get();
    }
    filling_.push_back(arrival);
    return arrival;
}

// The message of a receive is complete.
void Inbox::finish(const TcpMessagePtr& receive, const Arrival& arrival) {
    if (!accepts(*receive, arrival.from, arrival.bytes)) return;
    if (arrival.bytes && receive->data != arrival.data) std::memcpy(receive->data, arrival.data, arrival.bytes);
    receive->peer = arrival.from;
    receive->is_done = true;
}

void Inbox::complete(Arrival& arrival) {
    filling_.remove_if([&](const ArrivalPtr& filling) { return filling.get() == &arrival; });
    arrival.is_complete = true;
    if (const TcpMessagePtr& receive = arrival.receive ? arrival.receive : arrival.late_receive)
        finish(receive, arrival);
}

void Inbox::post(const TcpMessagePtr& receive) {
    const auto matches = [&](const auto& queue) {
        const auto [from, tag] = queue.first;
        return tag == receive->tag && (receive->peer == Transport::kAnyone || from == receive->peer);
    };
    const auto queue = std::find_if(unexpected_.begin(), unexpected_.end(), matches);
    if (queue == unexpected_.end() || !take_claim(receive->claim)) {
        posted_[{receive->peer, receive->tag}].push_back(receive);
        expected_ += receive->bytes;
        return;
    }
    const ArrivalPtr arrival = take_front(unexpected_, queue);
    if (arrival->is_complete)
        finish(receive, *arrival);
    else
        arrival->late_receive = receive;
}

void Inbox::withdraw(const TcpMessagePtr& receive) {
    for (auto queue = posted_.begin(); queue != posted_.end();) {
        expected_ -= std::erase(queue->second, receive) * receive->bytes;
        queue = queue->second.empty() ? posted_.erase(queue) : std::next(queue);
    }
    for (const ArrivalPtr& arrival : filling_) {
        if (arrival->late_receive == receive) arrival->late_receive = nullptr;
        if (arrival->receive != receive) continue;
        arrival->receive = nullptr;  // the rest of the message goes to a buffer that nothing reads
        arrival->buffer.reset(new std::byte[arrival->bytes]);
        arrival->data = arrival->buffer.get();
    }
}

void Inbox::fail(int from, const Failure& error) {
    const auto fails = [&](int sender) { return sender == from || from == Transport::kAnyone; };
    std::erase_if(posted_, [&](const auto& queue) {
        if (!fails(queue.first.first)) return false;
        for (const TcpMessagePtr& receive : queue.second) {
            fail_message(*receive, error);
            expected_ -= receive->bytes;
        }
        return true;
    });
    for (auto& [key, arrivals] : unexpected_) {
        if (fails(key.first)) std::erase_if(arrivals, [](const ArrivalPtr& arrival) { return !arrival->is_complete; });
    }
    std::erase_if(unexpected_, [](const auto& queue) { return queue.second.empty(); });
    std::erase_if(filling_, [&](const ArrivalPtr& arrival) {
        if (!fails(arrival->from)) return false;
        for (const TcpMessagePtr& receive : {arrival->receive, arrival->late_receive}) {
            if (receive) fail_message(*receive, error);
        }
        return true;
    });
}

}  // namespace dist_prims
