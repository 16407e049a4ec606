// Groups that span hosts, all ranks as threads: each host has a segment of its own, and the transport between them is
// an in-memory network.
#include "../net/multi_host.h"

#include <fcntl.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <set>

#include "in_memory_network.h"

using namespace dist_prims;
using namespace std::chrono_literals;

namespace {

// `first`: the number of the first call.
void sums(const std::vector<std::vector<int>>& hosts, int size, const MakeTransport& make = nullptr,
          std::uint64_t first = 0) {
    const auto body = [size, first](MultiHostGroup& group, int rank) {
        const RankProgram program = ring(size, rank);
        std::uint64_t sequence = first;
        for (const std::size_t count : {0u, 1u, 5u, 100u, 3000u}) {
            for (const int segments : {1, 3}) {
                std::vector<std::int64_t> data(count);
                for (std::size_t i = 0; i < count; ++i) data[i] = rank + static_cast<std::int64_t>(i);
                auto* bytes = reinterpret_cast<std::byte*>(data.data());
                const Call call = sum_of(sequence++, count);
                if (group.is_small(call.collective, count * 8)) {
                    group.agree_and_move(call, ProgramBuffer::whole(bytes, count), 60s);
                } else {
                    group.agree(call, 60s);
                    execute(program, group.router, call.dtype, call.op, ProgramBuffer::whole(bytes, count), segments,
                            60s);
                }
                for (std::size_t i = 0; i < count; ++i)
                    CHECK(data[i] == size * static_cast<std::int64_t>(i) + size * (size - 1) / 2);
            }
        }
    };
    run_group(hosts, body, make);
}

CASE(sums_over_tcp) {
    sums({{0, 3}, {1}, {2, 4}}, 5, over_tcp(5));
}

CASE(sums_over_the_wrap_of_call_numbers) {
    sums({{0, 2}, {1}}, 3, nullptr, std::numeric_limits<std::uint64_t>::max() - 3);
}

// No two classes of messages share a tag, for any numbers of segments, and all tags are valid for the transport.
void tags_of_classes_differ(int largest) {
    const Tags tags(largest);
    std::set<int> found{tags.notice(), tags.unused(), tags.diagnosis(), tags.agreement(), tags.barrier()};
    CHECK(found.size() == 5);
    const std::uint64_t last = std::numeric_limits<std::uint64_t>::max();
    for (std::uint64_t each = 0; each < Tags::kSegments; ++each) {
        CHECK(tags.data(each) == tags.data(each + 3 * Tags::kSegments));
        found.insert({tags.data(each), tags.data(last - each)});
    }
    CHECK(found.size() == 5 + Tags::kSegments);
    CHECK(*found.begin() == tags.largest_of_users() + 1);
    CHECK(*found.rbegin() == largest);
    CHECK(tags.largest_of_users() > 0);
    std::uint64_t number = Tags::kNumbers - Tags::kSegments - 1;
    for (std::uint64_t each = 0; each < 2 * Tags::kSegments; ++each) {  // in turn across the end of the numbers
        const int before = tags.data(number), now = tags.data(number = Tags::segment_after(number));
        CHECK(now == (before == largest ? before + 1 - static_cast<int>(Tags::kSegments) : before + 1));
    }
    CHECK(number == Tags::kSegments - 1);
}

CASE(a_transport_with_too_few_tags_is_refused) {
    check_contains(text_of(caught([] { const Tags tags(1000); })), "the tags 0 to 1000 only");
}

// The numbers of segments go several times through their tags, while receives for the next meeting are posted.
CASE(tags_are_used_again_and_again) {
    constexpr int kSize = 4, kRounds = 40, kMany = 53;
    run_group({{0, 1}, {2}, {3}}, [](MultiHostGroup& group, int rank) {
        const RankProgram program = ring(kSize, rank);
        for (std::uint64_t sequence = 0; sequence < 2 * kRounds; ++sequence) {
            const std::size_t count = sequence % 2 ? 1000 : 3;
            std::vector<std::int64_t> data(count);
            for (std::size_t i = 0; i < count; ++i) data[i] = rank * static_cast<std::int64_t>(i + sequence);
            auto* bytes = reinterpret_cast<std::byte*>(data.data());
            const Call call = sum_of(sequence, count);
            if (sequence % 2) {
                group.agree(call, 60s);
                execute(program, group.router, call.dtype, call.op, ProgramBuffer::whole(bytes, count), kMany, 60s);
            } else {
                group.agree_and_move(call, ProgramBuffer::whole(bytes, count), 60s);
            }
            for (std::size_t i = 0; i < count; ++i) CHECK(data[i] == 6 * static_cast<std::int64_t>(i + sequence));
        }
    });
    static_assert(kRounds * kMany > 2 * Tags::kSegments);
}

// A schedule with so many steps that more segments than tags would be under way at once. Rank 0 sends one chunk in the
// first step and another in a late step, when a later segment with the same tag would be in its first.
CASE(no_more_segments_are_under_way_than_there_are_tags) {
    constexpr std::size_t kLate = Tags::kSegments + 1, kMany = Tags::kSegments + 80;
    run_group({{0}, {1}}, [](MultiHostGroup& group, int rank) {
        RankProgram program{2, 0, std::vector<RankProgram::Step>(kLate + 1)};
        for (const int chunk : {0, 1}) {
            RankProgram::Step& step = program.steps[chunk == 0 ? 0 : kLate];
            if (rank == 0) step.sends.push_back({1, {chunk}, {chunk}});
            if (rank == 1) step.receives.push_back({0, {chunk}, {chunk}});
            if (rank == 1) step.writes.push_back({chunk, chunk, true, {{0, 0}}});
        }
        std::vector<std::int64_t> data(2 * kMany);
        for (std::size_t i = 0; rank == 0 && i < data.size(); ++i) data[i] = static_cast<std::int64_t>(i);
        auto* bytes = reinterpret_cast<std::byte*>(data.data());
        const Call call = sum_of(0, data.size());
        group.agree(call, 60s);
        execute(program, group.router, call.dtype, call.op, ProgramBuffer::whole(bytes, data.size()),
                static_cast<int>(kMany), 60s);
        for (std::size_t i = 0; i < data.size(); ++i) CHECK(data[i] == static_cast<std::int64_t>(i));
    });
}

// The mean of a half type is finite where the sum is not, in the agreement's message and in a program.
void means(const std::vector<std::vector<int>>& hosts, int size) {
    run_group(hosts, [size](MultiHostGroup& group, int rank) {
        constexpr std::uint16_t k40000 = 0x78E2;  // in float16, which ends at 65504
        std::uint64_t sequence = 0;
        for (const std::size_t count : {1u, 100u, 3000u}) {
            std::vector<std::uint16_t> data(count, k40000);
            auto* bytes = reinterpret_cast<std::byte*>(data.data());
            Call call = sum_of(sequence++, count);
            call.dtype = DType::kFloat16;
            call.op = Op::kAvg;
            if (group.is_small(call.collective, count * 2)) {
                group.agree_and_move(call, ProgramBuffer::whole(bytes, count), 60s);
            } else {
                group.agree(call, 60s);
                execute(ring(size, rank), group.router, call.dtype, call.op, ProgramBuffer::whole(bytes, count), 2,
                        60s);
            }
            for (const std::uint16_t each : data) CHECK(each == k40000);
        }
    });
}

CASE(a_mismatch_is_reported_on_all_ranks) {
    run_group({{0, 3}, {1}, {2, 4}}, [](MultiHostGroup& group, int rank) {
        for (const int odd : {0, 1, 4}) {
            CHECK(fails(CommError::Kind::kMismatch, [&] { group.agree(sum_of(0, rank == odd ? 7 : 8), 60s); }));
        }
        group.agree(sum_of(1, 8), 60s);
    });
}

// Ranks with data of different sizes in the messages of their agreement get the error, and not the data of others.
CASE(a_mismatch_in_the_size_of_small_data_names_both_calls) {
    run_group({{0, 3}, {1}, {2, 4}}, [](MultiHostGroup& group, int rank) {
        for (const int odd : {0, 1, 3, 4}) {
            std::vector<std::int64_t> data(rank == odd ? 128 : 1, 1);
            auto* bytes = reinterpret_cast<std::byte*>(data.data());
            const std::string error = text_of(caught(
                [&] { group.agree_and_move(sum_of(0, data.size()), ProgramBuffer::whole(bytes, data.size()), 60s); }));
            for (const char* count : {"int64, 1 elements", "int64, 128 elements"}) check_contains(error, count);
            check_contains(error, "ank " + std::to_string(odd) + " calls");
        }
    });
}

CASE(an_agreement_sums_the_terms_of_all_ranks) {
    run_group({{0, 3}, {1}, {2, 4}}, [](MultiHostGroup& group, int rank) {
        for (std::uint64_t sequence = 0; sequence < 3; ++sequence) {
            const auto term = static_cast<std::uint64_t>(rank) - 2;  // wraps around
            CHECK(group.agree(sum_of(sequence, 1), 60s, {term + sequence, 1, 2}) == (Terms{5 * sequence, 5, 10}));
        }
        CHECK(fails(CommError::Kind::kMismatch, [&] { group.agree(sum_of(3, rank == 1 ? 7 : 8), 60s, {1, 0}); }));
        CHECK(group.agree(sum_of(4, 1), 60s, {1, 0, 0}) == (Terms{5, 0, 0}));
    });
}

// The leaders of the first two hosts measure, and all ranks learn what they have found. Two hosts with one network have
// no link.
CASE(all_ranks_learn_what_the_link_costs) {
    for (const bool is_one_network : {false, true}) {
        std::mutex mutex;
        std::set<std::uint64_t> found;
        run_group({{2, 3}, {0}, {1, 4}}, [&](MultiHostGroup& group, int rank) {
            const LinkCosts costs = group.first_agreement(sum_of(0, 1), is_one_network || rank == 0 ? 7 : 8, 60s);
            CHECK((costs.alpha > 0 && costs.beta > 0) != is_one_network);
            CHECK(group.first_agreement(sum_of(1, 1), 0, 60s).beta == 0);
            const std::lock_guard lock(mutex);
            found.insert(costs.packed());
        });
        CHECK(found.size() == 1);
    }
}

// The first messages of a rank are late: the number of its network and its echoes.
class SlowBeginning : public InMemoryTransport {
public:
    using InMemoryTransport::InMemoryTransport;
    Handle send(int to, int tag, const std::byte* data, std::size_t bytes, Owner owner) override {
        if (sent_++ < 7) std::this_thread::sleep_for(20ms);
        return InMemoryTransport::send(to, tag, data, bytes, std::move(owner));
    }

private:
    int sent_ = 0;
};

// A price of 0 means that the link was not measured. The price was 0 if the echoes took longer than the blocks.
CASE(a_link_with_late_echoes_has_costs) {
    InMemoryNetwork network;
    run_group(
        {{0}, {1}},
        [](MultiHostGroup& group, int rank) {
            const LinkCosts costs = group.first_agreement(sum_of(0, 1), rank == 0 ? 7 : 8, 60s);
            CHECK(costs.alpha > 0.01 && costs.beta > 0);
        },
        [&](int rank) { return std::make_unique<SlowBeginning>(network, rank); });
}

CASE(costs_of_a_link_are_packed) {
    for (const LinkCosts costs : {LinkCosts{50e-6, 8.5e-9}, LinkCosts{1, 4e-6}, LinkCosts{1e-9, 1e-15}}) {
        const LinkCosts unpacked = LinkCosts::unpacked(costs.packed());
        CHECK(std::abs(unpacked.alpha / costs.alpha - 1) < 1e-6 && std::abs(unpacked.beta / costs.beta - 1) < 1e-6);
    }
    CHECK(LinkCosts{}.packed() == (LinkCosts{1e-9, 1e-15}.packed()));  // never 0, which means that there are none
}

// Without data, an agreement sends 32 bytes for each host; with data, as many more as there are.
CASE(an_agreement_is_small) {
    const std::vector<std::vector<int>> hosts{{0, 6}, {1}, {2}, {3}, {4}, {5}};
    const auto longest = [&](std::size_t count) {
        return run_group(hosts,
                         [count](MultiHostGroup& group, int) {
                             std::vector<std::int64_t> data(count, 1);
                             auto* bytes = reinterpret_cast<std::byte*>(data.data());
                             if (count == 0) return void(group.agree(sum_of(0, 1), 60s));
                             group.agree_and_move(sum_of(0, count), ProgramBuffer::whole(bytes, count), 60s);
                             for (const std::int64_t each : data) CHECK(each == 7);
                         })
            .longest;
    };
    CHECK(longest(0) == 2 * 40);  // a message of the first round has one frame, and one of the second round two
    CHECK(longest(1) == 2 * (40 + 8));
    CHECK(longest(128) == 2 * (40 + 1024));
}

// Rank 1 leaves in the middle. Rank 2, which does not wait for it, learns of that from the others.
CASE(a_rank_that_leaves_is_named) {
    run_group({{0}, {1}, {2}, {3}}, [](MultiHostGroup& group, int rank) {
        group.agree(sum_of(0, 1), 60s);
        if (rank == 1) return;
        const auto agree_until_error = [&] {
            for (std::uint64_t sequence = 1;; ++sequence) group.agree(sum_of(sequence, 1), 60s);
        };
        CHECK(fails(CommError::Kind::kPeerDied, agree_until_error, "host 1"));
        group.remote.end();
    });
}

// Rank 1 ends the group first, and closes its connections. Rank 0 then closed its own by a receive from rank 1, its
// first remote rank: the receive failed at once, and closed nothing, so messages used memory that the caller freed.
CASE(the_end_of_a_group_closes_the_transport_after_a_rank_has_gone) {
    std::atomic<bool> is_closed{false}, is_gone{false};  // the transport of rank 0; rank 1, as rank 0 sees it
    std::atomic<int> agreed{0};
    const auto note_close = [&](int rank) { is_closed = is_closed || rank == 0; };
    const auto note_gone = [&](int rank, int peer) { is_gone = is_gone || (rank == 0 && peer == 1); };
    const auto body = [&](MultiHostGroup& group, int rank) {
        group.agree(sum_of(0, 1), 60s);
        ++agreed;
        wait_until([&] { return agreed == 3; });
        if (rank == 1) group.remote.end();
        if (rank == 0) {
            // A connection that was closed before it was accepted is not seen to end.
            for (const auto until = Clock::now() + 5s; !is_gone && Clock::now() < until;)
                std::this_thread::sleep_for(1ms);
            CHECK(!is_closed);
            group.remote.end();
            CHECK(is_closed);
        }
        wait_until([&] { return is_closed.load(); });
    };
    run_group({{0}, {1}, {2}}, body, over_tcp(3, note_close, note_gone));
}

// As if all connections had bytes to deliver since the transport was made, and delivered 1 MB/s.
class BusyTransport : public InMemoryTransport {
public:
    using InMemoryTransport::InMemoryTransport;
    std::map<int, Delivered> delivered() override {
        const auto time = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - made_);
        return {{0, {static_cast<std::uint64_t>(time.count()), time}},
                {1, {static_cast<std::uint64_t>(time.count()), time}}};
    }

private:
    const Clock::time_point made_ = Clock::now();
};

// A call that waits for many messages, each for a short time, until the condition holds on rank 0.
template <typename Condition>
void make_many_short_waits(const Condition& condition, const std::function<void()>& when_made = [] {}) {
    InMemoryNetwork network;
    const auto body = [&](MultiHostGroup& group, int rank) {
        group.remote.begin_call(sum_of(0, 1), 2s);
        std::byte goes_on{1};
        for (std::uint64_t number = 0; goes_on == std::byte{1}; ++number) {
            if (rank == 0) goes_on = std::byte{!condition()};
            const int tag = group.remote.tags.data(number);
            group.remote.wait(rank == 0 ? group.remote.send(1, tag, &goes_on, 1, 60s)
                                        : group.remote.receive(0, tag, &goes_on, 1, 60s));
            if (rank == 1 && number == 0) when_made();  // after the first message both ranks have made the group
            std::this_thread::sleep_for(100us);
        }
    };
    run_group({{0}, {1}}, body, [&](int rank) { return std::make_unique<BusyTransport>(network, rank); });
}

// Runs the case that calls this in a program of its own, whose descriptor 2 is `file` from the beginning.
void run_with_stderr(const std::filesystem::path& file, const char* name, const char* variable) {
    const Child program([&] {
        ::dup2(::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), 2);
        ::setenv(variable, file.c_str(), 1);
        ::execl("/proc/self/exe", "core_test", name, nullptr);
    });
    CHECK(program.status() == 0);
}

std::string contents_of(const std::filesystem::path& file) {
    std::ifstream stream(file);
    return {std::istreambuf_iterator<char>(stream), {}};
}

// A wait looked only when it had lasted for 50 ms, so a slow call of many short waits was never reported.
CASE(a_slow_call_of_many_short_waits_is_reported) {
    constexpr const char* kVariable = "FILE_OF_STDERR";
    if (const char* const file = std::getenv(kVariable)) {
        const auto until = Clock::now() + 30s;
        return make_many_short_waits([&] { return !contents_of(file).empty() || Clock::now() > until; });
    }
    const auto file = std::filesystem::temp_directory_path() / ("stderr" + std::to_string(::getpid()));
    run_with_stderr(file, "a_slow_call_of_many_short_waits_is_reported", kVariable);
    check_contains(contents_of(file), "s so far, the timeout is 2 s; rank 0 on host 0 gets 1.0 MB/s");
    std::filesystem::remove(file);
}

// The line was written into the file that had got descriptor 2 after the program had closed stderr.
CASE(a_slow_call_is_not_reported_into_another_file) {
    const auto file = std::filesystem::temp_directory_path() / ("not_stderr" + std::to_string(::getpid()));
    const int descriptor = ::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    const auto until = Clock::now() + 2500ms;
    make_many_short_waits([&] { return Clock::now() > until; }, [&] { CHECK(::dup2(descriptor, 2) == 2); });
    CHECK(contents_of(file).empty());
    std::filesystem::remove(file);
}

// Rank 4 waits for 3, 3 for 2, and 2 for 5 on its own host. Rank 5 is stopped and waits for no rank. When rank 4 times
// out, all ranks must name rank 5, also those that time out later. Rank 0 waits for rank 1, which only computes: it
// does not reply either, but is not the culprit. Rank 2, which waits for no other host, learns of the diagnosis from
// another rank.
CASE(the_rank_that_does_not_reply_is_named) {
    constexpr int kAwaited[] = {1, -1, 5, 2, 3, -1}, kWaiting = 4;
    std::atomic<int> ended{0};
    run_group({{0}, {1}, {2, 5}, {3}, {4}}, [&](MultiHostGroup& group, int rank) {
        if (kAwaited[rank] < 0) {
            while (ended < kWaiting) std::this_thread::sleep_for(10ms);
            return;
        }
        if (rank != 4) std::this_thread::sleep_for(300ms);
        std::byte nothing{};
        const auto receive_byte = [&] {
            const std::chrono::milliseconds timeout = rank == 4 ? 1500ms : 60s;
            group.router.wait({group.router.receive(kAwaited[rank], group.router.next(), &nothing, 1, timeout)});
        };
        CHECK(fails(CommError::Kind::kLost, receive_byte, "rank 5"));
        group.remote.end();
        ++ended;
    });
}

// Rank 0 waits for 33, and 33 for 50, which is late, as are all others. In a group of so many ranks no rank sends to
// all others. Once each did, and where no descriptor was left for a connection the errors named a healthy rank. Rank 0
// learns from ranks that forward it that 33 waits for 50, and all ranks learn so of the end of the group.
CASE(many_ranks_learn_of_a_failure_over_few_connections) {
    constexpr int kSize = 66;
    static_assert(kSize > TimeoutDiagnosis::kDirect);
    std::atomic<int> begun{0};
    const auto body = [&](MultiHostGroup& group, int rank, HostSegment& host_segment) {
        std::byte nothing{};
        ++begun;
        wait_until([&] { return begun == kSize; });  // the last of so many may begin after half a second
        const auto receive_byte = [&] {
            const std::chrono::milliseconds timeout = rank == 0 ? 500ms : 60s;
            group.router.wait({group.router.receive(rank ? 50 : 33, group.router.next(), &nothing, 1, timeout)});
        };
        if (rank == 0 || rank == 33) CHECK(fails(CommError::Kind::kLost, receive_byte, "rank 50"));
        wait_until([&] { return host_segment.membership.notice().has_value(); });
        CHECK(host_segment.membership.notice()->culprit == 50);
        group.remote.end();
    };
    std::vector<std::vector<int>> hosts;
    for (int rank = 0; rank < kSize; ++rank) hosts.push_back({rank});
    const NetworkUse use = run_group(hosts, body);
    // By sender: 7 successors, 3 more from which the agreement expects messages, and the awaited rank.
    std::map<int, int> links;
    for (const auto& [link, count] : use.control_messages) ++links[link.first];
    for (const auto& [rank, count] : links) CHECK(count <= 11);
    CHECK(links.size() == kSize);
}

// Each rank waits for the next one. `dropped`: between these ranks messages vanish. `texts`: what the error of each
// says.
void wait_in_a_circle(const std::set<std::pair<int, int>>& dropped, CommError::Kind kind,
                      const std::array<std::string, 3>& texts) {
    const auto body = [&](MultiHostGroup& group, int rank) {
        std::byte nothing{};
        const auto receive_byte = [&] {
            group.router.wait({group.router.receive((rank + 1) % 3, group.router.next(), &nothing, 1, 500ms)});
        };
        CHECK(fails(kind, receive_byte, texts[static_cast<std::size_t>(rank)]));
        group.remote.end();
    };
    run_group({{0}, {1}, {2}}, body, nullptr, dropped);
}

// All ranks reply, so none is late. A rank was named, at each rank another one.
CASE(a_circle_of_waits_is_no_ranks_fault) {
    using Kind = CommError::Kind;
    const auto by_all = [](const std::string& text) { return std::array{text, text, text}; };
    wait_in_a_circle({}, Kind::kLost,
                     by_all("no rank is late, but the ranks wait for each other in a circle, rank 0 on host 0"));
    wait_in_a_circle({{1, 0}}, Kind::kUnreachable, by_all("rank 1 on host 1 cannot be reached from rank 0 on host 0"));
    wait_in_a_circle({{0, 2}, {2, 0}}, Kind::kUnreachable,
                     by_all("rank 2 on host 2 cannot be reached from rank 0 on host 0"));
}

// Rank 2 receives no reply, and named rank 0 as late. All ranks did, if its notice arrived first as the link healed.
CASE(a_rank_that_is_cut_off_does_not_blame_the_rank_it_waits_for) {
    const std::string by_others = "rank 2 on host 2 has not replied to rank 0 on host 0 in time";
    wait_in_a_circle({{0, 2}, {2, 0}, {1, 2}, {2, 1}}, CommError::Kind::kSilent,
                     {by_others, by_others, "rank 0 on host 0 has not replied to rank 2 on host 2 in time"});
}

// Rank 0 names rank 1, whose reply has reached rank 2 and not rank 0. The host of rank 1 may have answered rank 0: as a
// link heals, one direction may deliver before the other. All ranks named rank 1.
CASE(a_rank_that_has_replied_is_not_named_by_a_notice) {
    using Kind = CommError::Kind;
    const int tag = Tags(InMemoryTransport::kLargestTag).diagnosis();
    InMemoryNetwork network;
    InMemoryTransport transports[] = {{network, 0}, {network, 1}, {network, 2}};
    std::atomic<int> kind{-1}, other{-1};
    const auto ignore = [](const auto&) {};
    const auto note = [&](const std::optional<Membership::Notice>& notice) {
        if (!notice) return;
        other = notice->other;
        kind = static_cast<int>(notice->kind);
    };
    TimeoutDiagnosis sender(transports[0], tag, 0, {1, 2}, ignore), waiting(transports[1], tag, 1, {0, 2}, ignore);
    TimeoutDiagnosis receiver(transports[2], tag, 2, {0, 1}, note);
    const Membership::Notice lost{Kind::kLost, 1};
    CHECK(receiver.corrected(lost, 0).kind == Kind::kLost);
    waiting.diagnose(2, [] { return true; });
    wait_until([&] { return receiver.corrected(lost, 0).kind == Kind::kSilent; });
    CHECK(receiver.corrected({Kind::kLost, 2}, 0).kind == Kind::kLost);  // rank 2 itself is busy
    CHECK(receiver.corrected({Kind::kPeerDied, 1}, 0).kind == Kind::kPeerDied);
    sender.send_notice(lost);
    wait_until([&] { return kind == static_cast<int>(Kind::kSilent); });
    CHECK(other == 0);
}

// Rank 2 leaves in the middle of a program. What the transport keeps of the receives stays in memory until the
// transport goes.
CASE(a_transport_may_keep_memory) {
    const NetworkUse use = run_group({{0}, {1}, {2}}, [](MultiHostGroup& group, int rank) {
        if (rank == 2) return;
        auto data = std::make_shared<std::vector<std::int64_t>>(3000);
        auto* bytes = reinterpret_cast<std::byte*>(data->data());
        const std::size_t count = data->size();
        const auto buffer = ProgramBuffer::whole(bytes, count, std::shared_ptr<const void>(std::move(data), bytes));
        const RankProgram program = ring(3, rank);
        const auto error = caught([&] { execute(program, group.router, DType::kInt64, Op::kSum, buffer, 3, 60s); });
        CHECK(error);
    });
    CHECK(use.kept > 0);
}

// Of one whole and of blocks of different lengths. The last rank has no output.
void reads_inputs_and_writes_outputs(const std::vector<std::size_t>& counts) {
    run_group({{0, 1}, {2}}, [&](MultiHostGroup& group, int rank) {
        constexpr int kSize = 3;
        const bool has_output = rank < kSize - 1;
        std::vector<std::vector<std::int64_t>> inputs, outputs;
        ProgramBuffer buffer;
        for (const std::size_t count : counts) {
            auto& input = inputs.emplace_back(count, 10 + rank);
            auto& output = outputs.emplace_back(count, -1);
            buffer.blocks.push_back({reinterpret_cast<const std::byte*>(input.data()),
                                     has_output ? reinterpret_cast<std::byte*>(output.data()) : nullptr, count});
        }
        for (const int segments : {1, 3, 7}) {
            execute(ring(kSize, rank), group.router, DType::kInt64, Op::kSum, buffer, segments, 60s);
            for (std::size_t block = 0; block < counts.size(); ++block) {
                for (const std::int64_t value : inputs[block]) CHECK(value == 10 + rank);
                for (const std::int64_t value : outputs[block]) CHECK(value == (has_output ? 33 : -1));
                std::fill(outputs[block].begin(), outputs[block].end(), -1);
            }
        }
    });
}

CASE(programs_read_inputs_and_write_outputs) {
    reads_inputs_and_writes_outputs({5000});
    reads_inputs_and_writes_outputs({2});
    reads_inputs_and_writes_outputs({1000, 0, 70'000});
}

CASE(sums_on_several_hosts) {
    sums({{0}, {1}}, 2);
    sums({{0, 1}, {2, 3}}, 4);
    sums({{0, 2}, {1}, {3, 4}}, 5);
}

CASE(means_on_several_hosts) {
    means({{0}, {1}}, 2);
    means({{0, 2}, {1}, {3, 4}}, 5);
}

CASE(tags_of_message_classes_differ) {
    for (const int largest : {32766, 32767, 524'287, std::numeric_limits<int>::max()}) tags_of_classes_differ(largest);
}

}  // namespace
