// The cases that every transport must pass, and what they share.
//
// A Network has as many ranks as it is constructed with: transports of this process that are connected to each other.
// network[rank] is one of them, and network.ranks[rank] owns it.
#pragma once

#include <atomic>
#include <cstddef>
#include <random>
#include <string>
#include <vector>

#include "../net/tags.h"
#include "../net/transport.h"
#include "test_support.h"

namespace dist_prims {

using namespace std::chrono_literals;

inline std::vector<std::byte> pattern(std::size_t bytes, int seed) {
    std::vector<std::byte> made(bytes);
    for (std::size_t each = 0; each < bytes; ++each)
        made[each] = static_cast<std::byte>((each * 31 + each / 251 + static_cast<std::size_t>(seed)) & 0xff);
    return made;
}

inline Transport::Handle send(Transport& from, int to, int tag, const std::vector<std::byte>& data) {
    return from.send(to, tag, data.data(), data.size());
}

inline Transport::Handle receive(Transport& to, int from, int tag, std::vector<std::byte>& data) {
    return to.receive(from, tag, data.data(), data.size());
}

inline void wait(const Transport::Handle& request) {
    while (!request->wait(60s)) {
    }
}

template <typename Work>
std::string transport_error_of(const Work& work) {
    try {
        work();
    } catch (const Transport::TransportError& error) {
        return error.what();
    }
    return "";
}

template <typename Network>
void carries_messages_of_every_size() {
    Network network(2);
    for (const std::size_t bytes : {0u, 1u, 15u, 16u, 17u, 16383u, 16384u, 65536u, 65537u, 1000003u, 30000001u}) {
        const auto sent = pattern(bytes, 1);
        std::vector<std::byte> got(bytes);
        std::thread sender([&] { wait(send(network[0], 1, 7, sent)); });
        wait(receive(network[1], 0, 7, got));
        sender.join();
        CHECK(got == sent);
    }
}

template <typename Network>
void messages_of_a_tag_arrive_in_order() {
    Network network(2);
    std::thread sender([&] {
        for (int number = 0; number < 3000; ++number) {
            const std::vector<std::byte> data = pattern(static_cast<std::size_t>(number % 97), number);
            wait(send(network[0], 1, number % 3, data));
        }
    });
    for (int tag : {2, 0, 1}) {  // most of them are there before their receives
        for (int number = tag; number < 3000; number += 3) {
            std::vector<std::byte> got(static_cast<std::size_t>(number % 97));
            wait(receive(network[1], 0, tag, got));
            CHECK(got == pattern(got.size(), number));
        }
    }
    sender.join();
}

// Large messages that are not expected yet lie before a message that is awaited.
template <typename Network>
void a_message_behind_large_ones_is_received() {
    Network network(2);
    const auto large = pattern(5 << 20, 3), small = pattern(10, 4);
    std::thread sender([&] {
        std::vector<Transport::Handle> requests;
        for (int each = 0; each < 4; ++each) requests.push_back(send(network[0], 1, 5, large));
        requests.push_back(send(network[0], 1, 6, small));
        for (const auto& request : requests) wait(request);
    });
    std::vector<std::byte> got(small.size()), much(large.size());
    wait(receive(network[1], 0, 6, got));
    CHECK(got == small);
    for (int each = 0; each < 4; ++each) {
        std::fill(much.begin(), much.end(), std::byte{0});
        wait(receive(network[1], 0, 5, much));
        CHECK(much == large);
    }
    sender.join();
}

// Both send more than the buffers of the sockets hold before they receive.
template <typename Network>
void two_ranks_that_send_much_to_each_other_finish() {
    Network network(2);
    std::vector<std::thread> threads;
    for (const int rank : {0, 1}) {
        threads.emplace_back([&, rank] {
            const auto mine = pattern(20 << 20, rank);
            std::vector<std::byte> got(mine.size());
            Transport& transport = network[static_cast<std::size_t>(rank)];
            const auto incoming = receive(transport, 1 - rank, 1, got);
            const auto outgoing = send(transport, 1 - rank, 1, mine);
            wait(outgoing);
            wait(incoming);
            CHECK(got == pattern(got.size(), 1 - rank));
        });
    }
    for (auto& thread : threads) thread.join();
}

// A rank that waits for something else, or computes, still sends and receives.
template <typename Network>
void moves_messages_for_a_rank_that_does_not_wait() {
    Network network(2);
    const auto large = pattern(30 << 20, 5);
    std::vector<std::byte> got(large.size());
    const auto incoming = receive(network[1], 0, 1, got);
    const auto outgoing = send(network[0], 1, 1, large);
    wait_until([&] { return outgoing->is_done() && incoming->is_done(); });
    CHECK(got == large);
    std::fill(got.begin(), got.end(), std::byte{0});
    const auto second = receive(network[1], 0, 1, got);
    const auto again = send(network[0], 1, 1, large);
    network[0].move_in_background();
    network[1].move_in_background();
    wait_until([&] { return again->is_done() && second->is_done(); });
    CHECK(got == large);
}

template <typename Network>
void receives_from_anyone() {
    Network network(4);
    const Tags tags(network[0].largest_tag());
    for (const int tag : {9, tags.diagnosis()}) {
        std::vector<std::thread> senders;
        for (int rank = 1; rank < 4; ++rank) {
            senders.emplace_back([&, rank] {
                const std::vector<std::byte> data(1, static_cast<std::byte>(rank));
                wait(send(network[static_cast<std::size_t>(rank)], 0, tag, data));
            });
        }
        int sum = 0;
        for (int each = 0; each < 3; ++each) {
            std::vector<std::byte> got(1);
            wait(receive(network[0], Transport::kAnyone, tag, got));
            sum += static_cast<int>(got[0]);
        }
        CHECK(sum == 6);
        for (auto& sender : senders) sender.join();
    }
}

// A receive from any rank with a claim leaves its message to others if the claim has been taken in another place.
template <typename Network>
void a_message_meets_a_receive_only_with_its_claim() {
    for (const std::size_t bytes : {std::size_t{4}, std::size_t{5} << 20}) {
        for (const bool is_early : {false, true}) {
            Network network(3);
            const auto data = pattern(bytes, 6);
            std::vector<std::byte> claimed(bytes), got(bytes);
            const auto taken = std::make_shared<Claim>(), free = std::make_shared<Claim>();
            CHECK(taken->take());
            std::thread sender;
            const auto begin_to_send = [&] { sender = std::thread([&] { wait(send(network[2], 0, 9, data)); }); };
            if (is_early) begin_to_send();
            auto lost = network[0].receive_from_any(9, claimed.data(), bytes, nullptr, taken);
            const auto incoming = network[0].receive_from_any(9, got.data(), bytes, nullptr, free);
            if (!is_early) {
                network[0].progress();
                CHECK(incoming->source() == Transport::kAnyone);
                begin_to_send();
            }
            wait_until([&] {
                network[0].progress();
                return incoming->is_done();
            });
            wait(incoming);
            sender.join();
            CHECK(got == data);
            CHECK(incoming->source() == 2);
            CHECK(!free->take());
            CHECK(!lost->is_done());
            CHECK(claimed == std::vector<std::byte>(bytes));
            lost.reset();
            wait(send(network[1], 0, 9, pattern(3, 1)));
            const auto other = std::make_shared<Claim>();
            const auto too_long = network[0].receive_from_any(9, got.data(), 4, nullptr, other);
            check_contains(transport_error_of([&] { wait(too_long); }), "rank 1 has sent a message of 3 bytes");
        }
    }
}

template <typename Network>
void many_threads_wait_at_once() {
    constexpr int kSize = 4, kThreads = 4, kMessages = 60;
    Network network(kSize);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kSize; ++rank) {
        for (int number = 0; number < kThreads; ++number) {
            threads.emplace_back([&, rank, number] {
                Transport& transport = network[static_cast<std::size_t>(rank)];
                std::mt19937 random(static_cast<unsigned>(number));  // alike on all ranks
                const int to = (rank + 1 + number) % kSize, from = (rank + 2 * kSize - 1 - number) % kSize;
                if (to == rank) return;
                for (int each = 0; each < kMessages; ++each) {
                    const std::size_t bytes = each % 20 ? random() % 1000 : random() % 2000000;
                    const auto mine = pattern(bytes, rank);
                    std::vector<std::byte> got(bytes);
                    const auto outgoing = send(transport, to, number, mine);
                    const auto incoming = receive(transport, from, number, got);
                    wait(incoming);
                    wait(outgoing);
                    CHECK(got == pattern(bytes, from));
                }
            });
        }
    }
    for (auto& thread : threads) thread.join();
}

template <typename Network>
void an_aborted_wait_returns_and_can_be_repeated() {
    Network network(2);
    std::vector<std::byte> got(4);
    const auto incoming = receive(network[1], 0, 1, got);
    incoming->abort();
    CHECK(!incoming->wait(60s));  // the next wait
    std::atomic<bool> has_returned{false};
    std::thread waiter([&] {
        CHECK(!incoming->wait(60s));
        has_returned = true;
    });
    wait_until([&] {
        incoming->abort();
        return has_returned.load();
    });
    waiter.join();
    wait(send(network[0], 1, 1, pattern(4, 1)));
    wait(incoming);
    CHECK(got == pattern(4, 1));
}

template <typename Network>
void a_rank_that_has_gone_fails_what_depends_on_it() {
    Network network(3);
    std::vector<std::byte> got(4), last(4), other(4);
    const auto data = pattern(4, 2);
    wait(send(network[1], 0, 1, data));
    network.ranks[1] = nullptr;
    wait(receive(network[0], 1, 1, last));  // sent before it went
    CHECK(last == data);
    const auto lost = receive(network[0], 1, 1, got);
    CHECK(!transport_error_of([&] { wait(lost); }).empty());
    CHECK(!transport_error_of([&] { wait(receive(network[0], 1, 2, got)); }).empty());
    CHECK(!transport_error_of([&] { wait(receive(network[2], 1, 1, got)); }).empty());  // never connected
    wait_until([&] { return !transport_error_of([&] { wait(send(network[0], 1, 1, data)); }).empty(); });
    wait(send(network[2], 0, 1, data));
    wait(receive(network[0], 2, 1, other));
    CHECK(other == data);
}

template <typename Network>
void the_end_of_a_rank_that_has_left_is_no_death() {
    Network network(3);
    std::vector<std::byte> got(4);
    for (const int sender : {1, 2}) {
        wait(send(network[static_cast<std::size_t>(sender)], 0, 1, pattern(4, 2)));
        wait(receive(network[0], sender, 1, got));
    }
    network[1].leave();
    network.ranks[1] = nullptr;
    CHECK(!transport_error_of([&] { wait(receive(network[0], 1, 1, got)); }).empty());
    CHECK(network[0].failed_peer().rank == Transport::kAnyone);
    network.ranks[2] = nullptr;
    wait_until([&] {
        network[0].progress();
        return network[0].failed_peer().rank == 2;  // the end of rank 1, which came first, is known as well by now
    });
    CHECK(!network[0].failed_peer().is_unreachable);
}

template <typename Network>
void a_message_after_a_rank_has_left_arrives() {
    Network network(2);
    std::vector<std::byte> got(4);
    const auto first = pattern(4, 1), second = pattern(4, 2);
    wait(send(network[0], 1, 1, first));
    network[0].leave();
    wait(send(network[0], 1, 1, second));
    wait(receive(network[1], 0, 1, got));
    CHECK(got == first);
    wait(receive(network[1], 0, 1, got));
    CHECK(got == second);
}

template <typename Network>
void a_wait_beyond_its_limit_closes_all() {
    Network network(3);
    std::vector<std::byte> got(4), other(4);
    const auto unanswered = receive(network[0], 2, 1, other);
    const auto incoming = receive(network[0], 1, 1, got);
    check_contains(transport_error_of([&] { incoming->wait(5ms); }), "time limit");
    check_contains(transport_error_of([&] { wait(unanswered); }), "time limit");
    check_contains(transport_error_of([&] { receive(network[0], 1, 1, got); }), "time limit");
    check_contains(transport_error_of([&] { send(network[0], 1, 1, got); }), "time limit");
    CHECK(!transport_error_of([&] { wait(receive(network[1], 0, 1, got)); }).empty());
}

template <typename Network>
void lengths_that_differ_are_an_error() {
    Network network(2);
    std::vector<std::byte> got(5);
    const auto early = receive(network[1], 0, 1, got);
    wait(send(network[0], 1, 1, pattern(4, 1)));
    check_contains(transport_error_of([&] { wait(early); }),
                   "rank 0 has sent a message of 4 bytes, and the receive is for 5");
    wait(send(network[0], 1, 2, pattern(6, 1)));
    wait(send(network[0], 1, 3, pattern(5, 1)));
    wait(receive(network[1], 0, 3, got));
    check_contains(transport_error_of([&] { wait(receive(network[1], 0, 2, got)); }), "of 6 bytes");
}

template <typename Network>
void a_message_of_an_agreement_may_be_shorter() {
    Network network(2);
    const int tag = Tags(network[0].largest_tag()).agreement();
    for (const bool is_early : {false, true}) {
        std::vector<std::byte> got(5);
        Transport::Handle early;
        if (is_early) early = receive(network[1], 0, tag, got);
        wait(send(network[0], 1, tag, pattern(3, 1)));
        if (!is_early) early = receive(network[1], 0, tag, got);
        wait(early);
        got.resize(3);
        CHECK(got == pattern(3, 1));
        wait(send(network[0], 1, tag, pattern(4, 1)));
        check_contains(transport_error_of([&] { wait(receive(network[1], 0, tag, got)); }), "of 4 bytes");
    }
}

// The memory of a request that was given up is not written to any more.
template <typename Network>
void a_request_that_was_given_up_leaves_its_memory_alone() {
    Network network(2);
    const auto large = pattern(20 << 20, 7);
    {
        auto got = std::make_unique<std::vector<std::byte>>(large.size());
        auto incoming = receive(network[1], 0, 1, *got);
        const auto outgoing = send(network[0], 1, 1, large);
        std::this_thread::sleep_for(5ms);  // a part has come, unless the machine is slow
        incoming.reset();
        got.reset();  // the address sanitizer sees a write after this
        std::vector<std::byte> rest(large.size());
        const auto other = receive(network[1], 0, 1, rest);  // of the message, if nothing has come before
        wait(outgoing);
    }
    {  // what has been sent in part is sent to its end if it has an owner
        auto owned = std::make_shared<std::vector<std::byte>>(large);
        auto outgoing = network[0].send(1, 2, owned->data(), owned->size(), owned);
        outgoing.reset();
        owned.reset();
    }
    std::vector<std::byte> got(large.size());
    wait(receive(network[1], 0, 2, got));
    CHECK(got == large);
}

// The owner calls the transport when it is freed. The destructor of a Python object may do the same: it may wait for a
// thread that calls the transport.
template <typename Network>
void an_owner_is_freed_without_a_lock() {
    Network network(2);
    const auto large = pattern(20 << 20, 7);
    std::vector<std::byte> first(1);
    const auto incoming = receive(network[1], 0, 2, first);
    wait(send(network[0], 1, 2, pattern(1, 1)));
    wait(incoming);  // there is a connection, so a part of the next message is sent at once
    std::atomic<bool> is_freed{false};
    const auto call_and_free = [&](std::vector<std::byte>* memory) {
        std::thread([&] { network[0].progress(); }).join();  // a lock that this thread had would block it
        delete memory;
        is_freed = true;
    };
    std::shared_ptr<std::vector<std::byte>> owned(new std::vector<std::byte>(large), call_and_free);
    auto outgoing = network[0].send(1, 1, owned->data(), owned->size(), owned);
    outgoing.reset();
    owned.reset();
    std::vector<std::byte> got(large.size());
    wait(receive(network[1], 0, 1, got));
    CHECK(got == large);
    wait_until([&] { return is_freed.load(); });
}

}  // namespace dist_prims
