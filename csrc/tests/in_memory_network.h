// An in-memory network, and groups over it whose ranks are threads: each host has a segment of its own.
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "../net/multi_host.h"
#include "../net/schedule_executor.h"
#include "../tcp/transport.h"
#include "listening.h"
#include "test_support.h"

namespace dist_prims {

// Carries the messages of all ranks. Like gloo and MPI it matches messages and receives in the order in which they are
// posted, and writes to the receiver's memory when the message comes. Like gloo's, a wait ends early when it is
// aborted, and with an error when the other rank has closed.
class InMemoryNetwork {
public:
    using LinkCounts = std::map<std::pair<int, int>, int>;  // by sender and receiver
    static constexpr int kLargestTag = 32767;               // the least that MPI guarantees

    struct Address {
        int from, to, tag;
        bool meets(const Address& message) const {
            return to == message.to && tag == message.tag && (from == Transport::kAnyone || from == message.from);
        }
    };
    struct Receive {
        Address address;
        std::byte* const data;
        const std::size_t bytes;
        const Transport::Owner owner;
        bool done = false;
        std::condition_variable changed{};
    };

    // Like MPI, it cannot always give up a receive, and may write to its memory as long as it likes.
    ~InMemoryNetwork() {
        for (const auto& receive : kept_) std::memset(receive->data, 0xff, receive->bytes);
    }

    void send(const Address& address, const std::byte* data, std::size_t bytes) {
        const std::lock_guard lock(mutex);
        longest = std::max(longest, bytes);
        if (Tags(kLargestTag).is_control(address.tag)) ++control_messages[{address.from, address.to}];
        if (dropped.count({address.from, address.to})) return;
        const Message message{address, {data, data + bytes}};
        auto& [messages, receives] = mailboxes_[address.to];
        for (auto each = receives.begin(); each != receives.end(); ++each) {
            if (!(*each)->address.meets(address)) continue;
            deliver(message, **each);
            receives.erase(each);
            return;
        }
        messages.push_back(message);
    }
    void post(const std::shared_ptr<Receive>& receive) {
        const std::lock_guard lock(mutex);
        auto& [messages, receives] = mailboxes_[receive->address.to];
        for (auto each = messages.begin(); each != messages.end(); ++each) {
            if (!receive->address.meets(each->address)) continue;
            deliver(*each, *receive);
            messages.erase(each);
            return;
        }
        receives.push_back(receive);
    }
    void cancel(const std::shared_ptr<Receive>& receive) {
        const std::lock_guard lock(mutex);
        std::erase(mailboxes_[receive->address.to].receives, receive);
        if (receive->owner && !receive->done) kept_.push_back(receive);
    }
    std::size_t kept() {
        const std::lock_guard lock(mutex);
        return kept_.size();
    }
    void close(int rank) {
        const std::lock_guard lock(mutex);
        closed[rank] = true;
        for (const auto& [to, mailbox] : mailboxes_) {
            for (const auto& receive : mailbox.receives) receive->changed.notify_all();
        }
    }

    std::mutex mutex;  // of all below
    std::map<int, bool> closed;
    std::size_t longest = 0;                // of the messages that were sent
    std::set<std::pair<int, int>> dropped;  // messages from one rank to another vanish
    LinkCounts control_messages;            // the messages about failures

private:
    struct Message {
        Address address;
        std::vector<std::byte> data;
    };

    void deliver(const Message& message, Receive& receive) {
        const bool may_be_shorter = Tags(kLargestTag).may_be_shorter(message.address.tag);
        CHECK(message.data.size() == receive.bytes || (may_be_shorter && message.data.size() < receive.bytes));
        if (!message.data.empty()) std::memcpy(receive.data, message.data.data(), message.data.size());
        receive.address.from = message.address.from;
        receive.done = true;
        receive.changed.notify_all();
    }

    struct Mailbox {
        std::deque<Message> messages;                   // for which no receive has been posted yet
        std::deque<std::shared_ptr<Receive>> receives;  // which no message has met yet
    };

    std::map<int, Mailbox> mailboxes_;            // by receiver
    std::vector<std::shared_ptr<Receive>> kept_;  // which have been given up
};

class InMemoryTransport : public Transport {
public:
    static constexpr int kLargestTag = InMemoryNetwork::kLargestTag;

    InMemoryTransport(InMemoryNetwork& network, int rank) : network_(network), rank_(rank) {}
    ~InMemoryTransport() override { network_.close(rank_); }

    int largest_tag() const override { return kLargestTag; }
    std::vector<int> unanswering() override {
        std::vector<int> found;
        for (const auto& [from, to] : network_.dropped) {
            if (from == rank_) found.push_back(to);
        }
        return found;
    }

    Handle send(int to, int tag, const std::byte* data, std::size_t bytes, Owner) override {
        CHECK(tag >= 0 && tag <= kLargestTag);
        network_.send({rank_, to, tag}, data, bytes);
        return std::make_unique<Sent>();
    }
    Handle receive(int from, int tag, std::byte* data, std::size_t bytes, Owner owner) override {
        CHECK(tag >= 0 && tag <= kLargestTag);
        return std::make_unique<Awaited>(network_, std::make_shared<InMemoryNetwork::Receive>(
                                                       InMemoryNetwork::Address{from, rank_, tag}, data, bytes, owner));
    }

private:
    struct Sent : TransportRequest {
        bool wait(std::chrono::milliseconds) override { return true; }
        bool is_done() override { return true; }
        void abort() override {}
    };
    struct Awaited : TransportRequest {
        Awaited(InMemoryNetwork& network, std::shared_ptr<InMemoryNetwork::Receive> asked)
            : network(network), receive(std::move(asked)) {
            network.post(receive);
        }
        ~Awaited() override { network.cancel(receive); }

        bool wait(std::chrono::milliseconds limit) override {
            std::unique_lock lock(network.mutex);
            const auto until = Clock::now() + limit;
            const int from = receive->address.from;
            while (!receive->done) {
                if (std::exchange(aborted, false)) return false;
                if (from >= 0 && network.closed[from]) throw TransportError("connection closed");
                if (receive->changed.wait_until(lock, until) == std::cv_status::timeout)
                    throw TransportError("time is up");
            }
            return true;
        }
        bool is_done() override {
            const std::lock_guard lock(network.mutex);
            return receive->done;
        }
        int source() override {
            const std::lock_guard lock(network.mutex);
            return receive->address.from;
        }
        void abort() override {
            const std::lock_guard lock(network.mutex);
            aborted = true;
            receive->changed.notify_all();
        }

        InMemoryNetwork& network;
        const std::shared_ptr<InMemoryNetwork::Receive> receive;
        bool aborted = false;
    };

    InMemoryNetwork& network_;
    const int rank_;
};

using MakeTransport = std::function<std::unique_ptr<Transport>(int rank)>;

// Makes transports over TCP on the loopback interface, for ranks 0 to size - 1. `on_close`, `on_gone`: see
// TcpTransport.
inline MakeTransport over_tcp(std::size_t size, const std::function<void(int rank)>& on_close = nullptr,
                              const std::function<void(int rank, int peer)>& on_gone = nullptr) {
    const auto endpoints = std::make_shared<std::vector<TcpEndpoint>>(size);
    std::vector<std::string> addresses;
    for (TcpEndpoint& each : *endpoints) addresses.push_back(address_of(each.listening = listen_at_loopback()));
    return [endpoints, addresses, on_close, on_gone](int rank) {
        TcpEndpoint& endpoint = (*endpoints)[static_cast<std::size_t>(rank)];
        endpoint.addresses = addresses;
        return std::make_unique<TcpTransport>(
            std::move(endpoint), rank,
            [on_close, rank](const std::string&) {
                if (on_close) on_close(rank);
            },
            [on_gone, rank](int peer, const Failure&) {
                if (on_gone) on_gone(rank, peer);
            });
    };
}

// What a run leaves: receives that were given up, the longest message in bytes, and see InMemoryNetwork.
struct NetworkUse {
    std::size_t kept, longest;
    InMemoryNetwork::LinkCounts control_messages;
};

// Runs `body(group, rank)`, or `body(group, rank, host_segment)`, on a thread for each rank of the hosts, over an
// in-memory network or another.
template <typename Body>
NetworkUse run_group(const std::vector<std::vector<int>>& hosts, const Body& body, MakeTransport make = nullptr,
                     const std::set<std::pair<int, int>>& dropped = {}) {
    InMemoryNetwork network;
    network.dropped = dropped;
    if (!make) make = [&](int rank) { return std::make_unique<InMemoryTransport>(network, rank); };
    std::vector<std::thread> threads;
    std::map<int, std::string> titled;
    for (std::size_t host = 0; host < hosts.size(); ++host) {
        for (const int rank : hosts[host])
            titled[rank] = "rank " + std::to_string(rank) + " on host " + std::to_string(host);
    }
    std::vector<std::string> titles;
    for (const auto& [rank, title] : titled) titles.push_back(title);
    for (std::size_t host = 0; host < hosts.size(); ++host) {
        const auto& here = hosts[host];
        const int size = static_cast<int>(here.size());
        const auto memory = memory_for(size, MultiHostGroup::kMinSlotBytes);
        for (int local_rank = 0; local_rank < size; ++local_rank) {
            threads.emplace_back([&, host, here, size, local_rank, memory] {
                const int rank = here[static_cast<std::size_t>(local_rank)];
                HostSegment host_segment(memory, local_rank, size, MultiHostGroup::kMinSlotBytes,
                                         RankNames{here, titles});
                MultiHostGroup group(Hosts{hosts, host}, host_segment, make(rank));
                if constexpr (std::is_invocable_v<Body, MultiHostGroup&, int, HostSegment&>)
                    body(group, rank, host_segment);
                else
                    body(group, rank);
            });
        }
    }
    for (std::thread& thread : threads) thread.join();
    return {network.kept(), network.longest, network.control_messages};
}

inline Call sum_of(std::uint64_t sequence, std::size_t count) {
    Call call;
    call.collective = Collective::kAllReduce;
    call.dtype = DType::kInt64;
    call.op = Op::kSum;
    call.sequence = sequence;
    call.count = count;
    return call;
}

}  // namespace dist_prims
