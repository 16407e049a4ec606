// The UCX transport: ranks are transports of one process, connected over loopback.
//
// DIST_PRIMS_TEST_UCX is the path of libdist_prims_ucx.so, and DIST_PRIMS_TEST_LIBUCP that of libucp. main.cpp leaves
// these cases out where the first is not set.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>

#include <fstream>

#include "../ucx/library.h"
#include "listening.h"
#include "transport_cases.h"

using namespace dist_prims;

namespace {

ucx::UcxLibrary& library() {
    static ucx::UcxLibrary* const loaded = [] {
        void* const handle = ::dlopen(std::getenv("DIST_PRIMS_TEST_UCX"), RTLD_NOW);
        CHECK(handle);
        auto* const found = reinterpret_cast<ucx::GetLibrary*>(::dlsym(handle, ucx::kGetLibrary))();
        found->load(std::getenv("DIST_PRIMS_TEST_LIBUCP"));
        return found;
    }();
    return *loaded;
}

const ucx::Settings kSettings{{"TLS", "tcp"}, {"NET_DEVICES", "lo"}, {"TCP_CONN_NB", "y"}};

struct UcxNetwork {
    std::vector<std::unique_ptr<Transport>> ranks;

    explicit UcxNetwork(int size) {
        std::vector<Socket> listening;
        std::vector<std::string> ports, addresses;
        std::vector<std::unique_ptr<ucx::Endpoint>> endpoints;
        for (int rank = 0; rank < size; ++rank) {
            ports.push_back(address_of(listening.emplace_back(listen_at_loopback())));
            addresses.push_back(endpoints.emplace_back(library().make_endpoint(kSettings))->address());
        }
        for (int rank = 0; rank < size; ++rank) {
            const auto each = static_cast<std::size_t>(rank);
            TcpEndpoint tcp{std::move(listening[each]), ports, "the key of the group", true};
            ranks.push_back(endpoints[each]->connect({addresses, std::move(tcp), rank}));
        }
    }
    Transport& operator[](std::size_t rank) { return *ranks[rank]; }
};

std::size_t entries(const char* folder) {
    std::size_t count = 0;
    DIR* const opened = ::opendir(folder);
    CHECK(opened);
    while (::readdir(opened)) ++count;
    ::closedir(opened);
    return count;
}

}  // namespace

CASE(ucx_carries_messages_of_every_size) {
    carries_messages_of_every_size<UcxNetwork>();
}

CASE(ucx_messages_of_a_tag_arrive_in_order) {
    messages_of_a_tag_arrive_in_order<UcxNetwork>();
}

CASE(ucx_a_message_behind_large_ones_is_received) {
    a_message_behind_large_ones_is_received<UcxNetwork>();
}

CASE(ucx_two_ranks_that_send_much_to_each_other_finish) {
    two_ranks_that_send_much_to_each_other_finish<UcxNetwork>();
}

CASE(ucx_moves_messages_for_a_rank_that_does_not_wait) {
    moves_messages_for_a_rank_that_does_not_wait<UcxNetwork>();
}

CASE(ucx_receives_from_anyone) {
    receives_from_anyone<UcxNetwork>();
}

CASE(ucx_a_message_meets_a_receive_only_with_its_claim) {
    a_message_meets_a_receive_only_with_its_claim<UcxNetwork>();
}

CASE(ucx_many_threads_wait_at_once) {
    many_threads_wait_at_once<UcxNetwork>();
}

CASE(ucx_an_aborted_wait_returns_and_can_be_repeated) {
    an_aborted_wait_returns_and_can_be_repeated<UcxNetwork>();
}

CASE(ucx_a_rank_that_has_gone_fails_what_depends_on_it) {
    a_rank_that_has_gone_fails_what_depends_on_it<UcxNetwork>();
}

CASE(ucx_the_end_of_a_rank_that_has_left_is_no_death) {
    the_end_of_a_rank_that_has_left_is_no_death<UcxNetwork>();
}

CASE(ucx_a_message_after_a_rank_has_left_arrives) {
    a_message_after_a_rank_has_left_arrives<UcxNetwork>();
}

CASE(ucx_a_wait_beyond_its_limit_closes_all) {
    a_wait_beyond_its_limit_closes_all<UcxNetwork>();
}

CASE(ucx_lengths_that_differ_are_an_error) {
    lengths_that_differ_are_an_error<UcxNetwork>();
}

CASE(ucx_a_message_of_an_agreement_may_be_shorter) {
    a_message_of_an_agreement_may_be_shorter<UcxNetwork>();
}

CASE(ucx_a_request_that_was_given_up_leaves_its_memory_alone) {
    a_request_that_was_given_up_leaves_its_memory_alone<UcxNetwork>();
}

CASE(ucx_an_owner_is_freed_without_a_lock) {
    an_owner_is_freed_without_a_lock<UcxNetwork>();
}

// Connections, descriptors and threads end with the transports.
CASE(ucx_transports_leave_nothing) {
    const auto exchange = [] {
        UcxNetwork network(3);
        std::vector<std::byte> got(100000);
        const auto data = pattern(got.size(), 1);
        for (const int to : {1, 2}) {
            const auto sent = send(network[0], to, 1, data);
            wait(receive(network[static_cast<std::size_t>(to)], 0, 1, got));
            wait(sent);
            CHECK(got == data);
        }
    };
    exchange();  // UCX keeps what it makes first
    const std::size_t descriptors = entries("/proc/self/fd"), threads = entries("/proc/self/task");
    for (int each = 0; each < 20; ++each) exchange();
    CHECK(entries("/proc/self/fd") == descriptors);
    CHECK(entries("/proc/self/task") == threads);
}

// What a rank has sent arrives although it leaves at once.
CASE(ucx_a_rank_that_leaves_has_sent_all) {
    for (const std::size_t bytes : {1u, 1000u, 60000u, 5000000u}) {
        UcxNetwork network(2);
        const auto data = pattern(bytes, 3);
        std::vector<std::byte> got(bytes);
        std::thread leaver([&] {
            wait(send(network[1], 0, 1, data));
            network.ranks[1] = nullptr;
        });
        wait(receive(network[0], 1, 1, got));
        CHECK(got == data);
        leaver.join();
    }
}

// A rank that closes its library, as at the end of its process, fails what waits.
CASE(ucx_closing_the_library_ends_all_waits) {
    UcxNetwork network(2);
    std::vector<std::byte> got(4);
    const auto incoming = receive(network[0], 1, 1, got);
    std::thread closer([&] { library().close(); });
    check_contains(transport_error_of([&] { wait(incoming); }), "closed");
    closer.join();
    check_contains(transport_error_of([&] { send(network[0], 1, 1, got); }), "closed");
}

CASE(ucx_a_transport_that_ucx_does_not_have_is_reported) {
    library();
    check_contains(text_of(caught([] { library().make_endpoint({{"TLS", "no_such_transport"}}); })), "ucp_");
}
