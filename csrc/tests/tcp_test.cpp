// The TCP transport: ranks are transports of one process, connected over loopback.
#include <linux/tcp.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <random>

#include "../tcp/transport.h"
#include "listening.h"
#include "transport_cases.h"

using namespace dist_prims;
using namespace std::chrono_literals;

namespace {

constexpr const char* kKey = "the key of the group";

struct TcpNetwork {
    std::vector<std::string> addresses;
    std::vector<std::unique_ptr<TcpTransport>> ranks;

    // Ranks with even numbers poll.
    explicit TcpNetwork(int size) {
        std::vector<Socket> listening;
        for (int rank = 0; rank < size; ++rank)
            addresses.push_back(address_of(listening.emplace_back(listen_at_loopback())));
        for (int rank = 0; rank < size; ++rank)
            ranks.push_back(std::make_unique<TcpTransport>(
                TcpEndpoint{std::move(listening[static_cast<std::size_t>(rank)]), addresses, kKey, rank % 2 == 0},
                rank));
    }
    TcpTransport& operator[](std::size_t rank) { return *ranks[rank]; }
};

// A socket that is connected to a rank, and sends these bytes.
Socket connection_of_another(const std::string& address, const void* bytes, std::size_t count) {
    Socket made = connect_to(address);
    SocketPart part{const_cast<void*>(bytes), count};
    wait_until([&] {
        const SocketResult result = write_some(made, &part, 1);
        part = {static_cast<std::byte*>(part.data) + result.bytes, part.bytes - result.bytes};
        return part.bytes == 0 || !(result.error.empty() || result.error.text.find("connected") != std::string::npos);
    });
    return made;
}

// The end of the connection leaves nothing: its port can be used again at once.
void end_at_once(const Socket& socket) {
    const linger none{1, 0};
    CHECK(::setsockopt(socket.descriptor(), SOL_SOCKET, SO_LINGER, &none, sizeof(none)) == 0);
}

bool is_closed(const Socket& socket) {
    std::byte byte;
    const SocketPart part{&byte, 1};
    return !read_some(socket, &part, 1).error.empty();
}

}  // namespace

// A wait that has come and gone is noticed, also the one that takes the counter from 2^64 - 1 to 0.
CASE(a_wait_is_noticed_at_the_wrap_of_waits) {
    WaitingThreads<TcpMessage> threads(std::numeric_limits<std::uint64_t>::max() - 1);
    std::uint64_t waits = 0;
    CHECK(!threads.is_none_since(waits) && threads.is_none_since(waits));
    for (int each = 0; each < 4; ++each) {
        TcpMessage message;
        {
            const WaitingThreads<TcpMessage>::Scope awaited(threads, message);
            CHECK(!threads.is_none_since(waits) && !threads.is_none_since(waits));
        }
        CHECK(threads.is_none_since(waits));
        {
            const WaitingThreads<TcpMessage>::Scope awaited(threads, message);
        }
        CHECK(!threads.is_none_since(waits) && threads.is_none_since(waits));
    }
}

CASE(tcp_carries_messages_of_every_size) {
    carries_messages_of_every_size<TcpNetwork>();
}

CASE(tcp_messages_of_a_tag_arrive_in_order) {
    messages_of_a_tag_arrive_in_order<TcpNetwork>();
}

CASE(tcp_a_message_behind_large_ones_is_received) {
    a_message_behind_large_ones_is_received<TcpNetwork>();
}

CASE(tcp_two_ranks_that_send_much_to_each_other_finish) {
    two_ranks_that_send_much_to_each_other_finish<TcpNetwork>();
}

CASE(tcp_moves_messages_for_a_rank_that_does_not_wait) {
    moves_messages_for_a_rank_that_does_not_wait<TcpNetwork>();
}

CASE(tcp_receives_from_anyone) {
    receives_from_anyone<TcpNetwork>();
}

CASE(tcp_a_message_meets_a_receive_only_with_its_claim) {
    a_message_meets_a_receive_only_with_its_claim<TcpNetwork>();
}

CASE(tcp_many_threads_wait_at_once) {
    many_threads_wait_at_once<TcpNetwork>();
}

CASE(tcp_an_aborted_wait_returns_and_can_be_repeated) {
    an_aborted_wait_returns_and_can_be_repeated<TcpNetwork>();
}

CASE(tcp_a_rank_that_has_gone_fails_what_depends_on_it) {
    a_rank_that_has_gone_fails_what_depends_on_it<TcpNetwork>();
}

CASE(tcp_the_end_of_a_rank_that_has_left_is_no_death) {
    the_end_of_a_rank_that_has_left_is_no_death<TcpNetwork>();
}

CASE(tcp_a_message_after_a_rank_has_left_arrives) {
    a_message_after_a_rank_has_left_arrives<TcpNetwork>();
}

CASE(tcp_a_wait_beyond_its_limit_closes_all) {
    a_wait_beyond_its_limit_closes_all<TcpNetwork>();
}

CASE(tcp_lengths_that_differ_are_an_error) {
    lengths_that_differ_are_an_error<TcpNetwork>();
}

CASE(tcp_a_message_of_an_agreement_may_be_shorter) {
    a_message_of_an_agreement_may_be_shorter<TcpNetwork>();
}

CASE(tcp_a_request_that_was_given_up_leaves_its_memory_alone) {
    a_request_that_was_given_up_leaves_its_memory_alone<TcpNetwork>();
}

CASE(tcp_an_owner_is_freed_without_a_lock) {
    an_owner_is_freed_without_a_lock<TcpNetwork>();
}

CASE(tcp_an_error_says_how_a_connection_has_ended) {
    TcpNetwork network(3);
    std::vector<std::byte> got(4);
    wait(send(network[1], 0, 1, pattern(4, 2)));
    wait(receive(network[0], 1, 1, got));
    network.ranks[1] = nullptr;
    check_contains(transport_error_of([&] { wait(receive(network[0], 1, 1, got)); }), "closed");
    check_contains(transport_error_of([&] { wait(receive(network[2], 1, 1, got)); }), "refused");  // never connected
}

CASE(tcp_a_message_without_owner_that_was_given_up_in_part_ends_the_connection) {
    TcpNetwork network(2);
    std::vector<std::byte> got(1);
    const auto incoming = receive(network[1], 0, 2, got);
    wait(send(network[0], 1, 2, pattern(1, 1)));
    wait(incoming);  // there is a connection, so a part of the next message is sent at once
    auto outgoing = send(network[0], 1, 3, pattern(20 << 20, 7));
    outgoing.reset();
    wait_until([&] { return !transport_error_of([&] { wait(send(network[0], 1, 3, pattern(1, 1))); }).empty(); });
}

// DIST_PRIMS_TEST_HELLOS is the number of such processes.
CASE(tcp_rejects_other_processes) {
    const char* const given = std::getenv("DIST_PRIMS_TEST_HELLOS");
    const int attempts = given ? std::atoi(given) : 500;
    TcpNetwork network(2);
    std::vector<std::byte> got(4);
    const auto incoming = receive(network[0], 1, 1, got);
    std::mt19937 random(1);
    std::size_t resident = 0, descriptors = 0;
    for (int each = 0; each < attempts; ++each) {
        Greeting greeting(1, 0, 0, kKey);
        auto* const bytes = reinterpret_cast<unsigned char*>(&greeting);
        std::size_t count = sizeof(greeting);
        switch (each % 5) {
            case 0:
                greeting.code[random() % greeting.code.size()] ^= static_cast<unsigned char>(1u << random() % 8);
                break;
            case 1:
                greeting.magic ^= 1ull << random() % 64;
                break;
            case 2:
                (random() % 2 ? greeting.rank : greeting.lane) = static_cast<int>(random() | 4u);
                break;
            case 3:
                for (std::size_t byte = 0; byte < count; ++byte) bytes[byte] = static_cast<unsigned char>(random());
                count = random() % count;
                break;
            case 4:
                greeting = Greeting(1, 1, 0, kKey);  // to another rank
        }
        const Socket socket = connection_of_another(network.addresses[0], &greeting, count);
        end_at_once(socket);
        if (each == attempts / 10) resident = resident_bytes(), descriptors = open_descriptors();
        if (each % 5 != 3) wait_until([&] { return is_closed(socket); });
    }
    CHECK(!incoming->is_done());
    CHECK(resident_bytes() <= resident + (4 << 20));
    wait_until([&] { return open_descriptors() <= descriptors; });
    const Greeting second(1, 0, 0, kKey);
    wait(send(network[1], 0, 1, pattern(4, 1)));
    wait(incoming);
    CHECK(got == pattern(4, 1));
    const Socket impostor =
        connection_of_another(network.addresses[0], &second, sizeof(second));  // there is a rank 1 already
    wait_until([&] { return is_closed(impostor); });
}

// A host without a source address for a connection was reported to have no port left.
CASE(tcp_only_a_host_without_ports_is_exhausted) {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return;  // a host that does not allow it
    const auto failure_of = [](const std::string& address) {
        try {
            connect_to(address);
        } catch (const std::system_error& error) {
            return Failure{error.what(), error.code().value()};
        }
        return Failure{};
    };
    // 1. The network of this process is new: no interface is up, and none has an address.
    const Failure without_address = failure_of("[::1]:4711");
    CHECK(!without_address.is_exhaustion() && without_address.is_unreachable());
    check_contains(without_address.text, "[::1]:4711: no interface of this host has a source address for it");
    // 2. The loopback interface is up, and there is one port for two connections.
    const Socket listening = listen_at_loopback();
    ifreq loopback{};
    std::strcpy(loopback.ifr_name, "lo");
    loopback.ifr_flags = IFF_UP | IFF_RUNNING;
    CHECK(::ioctl(listening.descriptor(), SIOCSIFFLAGS, &loopback) == 0);
    std::ofstream range("/proc/sys/net/ipv4/ip_local_port_range");
    range << "50000 50000" << std::flush;
    if (!range) return;  // a container may mount it read-only
    const Socket first = connect_to(address_of(listening));
    CHECK(failure_of(address_of(listening)).is_exhaustion());
}

// The kernel acknowledged every second small message, because each read emptied its buffer.
CASE(tcp_reads_leave_the_trailers_of_small_messages) {
    const Socket listening = listen_at_loopback();
    OutgoingConnection to(address_of(listening), Greeting());
    std::optional<Socket> accepted;
    wait_until([&] { return (accepted = accept_from(listening)).has_value(); });
    Greeting greeting;
    const SocketPart part{&greeting, sizeof(greeting)};
    wait_until([&] {
        to.write();
        return read_some(*accepted, &part, 1).bytes == sizeof(greeting);
    });
    IncomingConnection from(std::move(*accepted), 1);
    Inbox inbox;
    const auto is_readable = [&] {
        pollfd watched{from.descriptor(), POLLIN, 0};
        return ::poll(&watched, 1, 0) == 1;
    };
    const auto unread_bytes = [&] {
        int bytes = -1;
        CHECK(::ioctl(from.descriptor(), FIONREAD, &bytes) == 0);
        return bytes;
    };
    // 1. The length of the first message is not expected. Then 7 of 8 reads leave the trailer, which wakes no thread.
    std::array<std::byte, 8> sent{std::byte{1}}, received{};
    for (int number = 0; number < 16; ++number) {
        const auto receive = std::make_shared<TcpMessage>(TcpMessage{false, 1, 0, received.data(), 8, nullptr});
        inbox.post(receive);
        to.push(std::make_shared<TcpMessage>(TcpMessage{true, 0, 0, sent.data(), 8, nullptr}));
        to.write();
        wait_until(is_readable);
        from.read(inbox, true);
        CHECK(receive->is_done && received == sent);
        CHECK(unread_bytes() == (number % 8 != 0) && from.has_unread_trailer() == (number % 8 != 0) && !is_readable());
    }
    // 2. Before a thread sleeps, it reads the trailer, so that the kernel acknowledges the messages.
    from.read(inbox, false);
    CHECK(unread_bytes() == 0 && !from.has_unread_trailer());
}

// A receive from any rank called a rank dead whose host only did not answer.
CASE(tcp_a_rank_whose_host_does_not_answer_has_not_died) {
    Socket listening = listen_at_loopback();
    const std::string address = address_of(listening);
    CHECK(::listen(listening.descriptor(), 0) == 0);
    // The kernel drops a connection for which there is no space, and the next one to ask for it gets no answer.
    std::vector<Socket> waiting;
    for (int each = 0; each < 3; ++each) waiting.push_back(connect_to(address));
    const int attempts = 1;
    Socket unanswered = connect_to(address);
    CHECK(::setsockopt(unanswered.descriptor(), IPPROTO_TCP, TCP_SYNCNT, &attempts, sizeof(attempts)) == 0);
    TcpLane lane([&](int) -> OutgoingConnection { return {address, Greeting()}; }, false);
    lane.add(1, std::move(unanswered));
    wait_until([&] {
        lane.progress();
        return lane.failed_peer().rank == 1;
    });
    CHECK(lane.failed_peer().is_unreachable);
}

CASE(tcp_addresses) {
    check_contains(text_of(caught([] { connect_to("nonsense:1"); })), "'nonsense' is not an IPv4 or IPv6 address");
    try {
        const Socket listening = listen_at_loopback(AF_INET6);
        const Socket connected = connect_to(address_of(listening));
        wait_until([&] { return accept_from(listening).has_value(); });
    } catch (const std::runtime_error&) {  // a host without IPv6
    }
}
