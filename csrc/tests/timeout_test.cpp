// Timeouts: which rank the errors name. Ranks are threads over one mapping; a rank is late if its thread does not make
// the call.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../net/schedule_executor.h"
#include "../shm/collectives.h"
#include "../shm/host_segment.h"
#include "test_support.h"

using namespace dist_prims;
using namespace std::chrono_literals;

namespace {

constexpr auto kTimeout = 400ms;

using Act = std::function<void(HostSegment&)>;

// What the errors of the ranks say. A rank without an act is late: it waits until all others have ended.
std::vector<std::string> errors_of(const std::vector<Act>& acts, const HostSegment::Counters& counters = {}) {
    const int size = static_cast<int>(acts.size());
    std::vector<std::string> errors(acts.size());
    std::atomic<int> ended{0};
    run_ranks(size, counters, [&](HostSegment& host_segment) {
        const auto rank = static_cast<std::size_t>(host_segment.membership.rank());
        if (acts[rank]) errors[rank] = text_of(caught([&] { acts[rank](host_segment); }));
        ++ended;
        wait_until([&] { return ended == size; });
    });
    return errors;
}

void check_named(const std::vector<Act>& acts, const std::string& part, const HostSegment::Counters& counters = {}) {
    const auto errors = errors_of(acts, counters);
    for (std::size_t rank = 0; rank < acts.size(); ++rank) {
        if (acts[rank]) check_contains(errors[rank], part);
    }
}

Act after(std::chrono::milliseconds delay, Act act) {
    return [delay, act = std::move(act)](HostSegment& host_segment) {
        std::this_thread::sleep_for(delay);
        act(host_segment);
    };
}

void open(HostSegment& host_segment, Collective collective) {
    Call call;
    call.collective = collective;
    call.sequence = 7;
    host_segment.slots.open(call, kTimeout);
}

void collective(HostSegment& host_segment) {
    open(host_segment, Collective::kBarrier);
    barrier(host_segment.slots);
}

void wait(HostSegment& host_segment, const PointToPoint::Handle& request) {
    CHECK(host_segment.p2p.wait(request, std::chrono::milliseconds::max()));
    if (request->error) std::rethrow_exception(request->error);
}

Act receive_from(int peer) {
    return [peer](HostSegment& host_segment) {
        std::byte data[8];
        wait(host_segment, host_segment.p2p.receive(peer, 3, data, sizeof data, kTimeout, nullptr));
    };
}

// A rank that is stopped in a receive.
Act stopped_receive_from(int peer) {
    return [peer](HostSegment& host_segment) {
        WaitGraph::Published published(host_segment.membership.wait_graph());
        published.set({WaitGraph::WaitKind::kReceive, false, peer});
        std::this_thread::sleep_for(2s);
    };
}

// More than a ring holds, so it waits for the receiver.
Act send_to(int peer) {
    return [peer](HostSegment& host_segment) {
        const std::vector<std::byte> data(1 << 21);
        wait(host_segment, host_segment.p2p.send(peer, 3, data.data(), data.size(), kTimeout, nullptr));
    };
}

// Each rank sends its data to the next one, and folds what comes, in as many steps as there are other ranks.
RankProgram gather_in_a_ring(int size, int rank) {
    RankProgram program;
    program.ranks = size;
    program.scratch = 1;
    const int next = (rank + 1) % size, before = (rank + size - 1) % size;
    for (int step = 0; step < size - 1; ++step)
        program.steps.push_back({{{next, {0}, {0}}}, {{before, {1}, {0}}}, {{1, 0, true, {{before, 0}}}}});
    return program;
}

void by_schedule(HostSegment& host_segment) {
    collective(host_segment);
    std::vector<double> data(1 << 10);
    auto* const bytes = reinterpret_cast<std::byte*>(data.data());
    Router router(host_segment.p2p, {}, nullptr);
    execute(gather_in_a_ring(host_segment.slots.size(), host_segment.slots.rank()), router, DType::kFloat64, Op::kSum,
            ProgramBuffer::whole(bytes, data.size()), 1, kTimeout);
}

CASE(a_rank_that_does_not_make_the_call) {
    check_named({collective, nullptr}, "no sign of rank 1, which has not made call number 7");
    check_named({collective, after(200ms, collective), nullptr}, "no sign of rank 2, which has not made call number 7");
    check_named({nullptr, collective, nullptr, collective}, "no sign of rank 0, 2, which have not made call number 7");
}

// The others have passed the wrap of their counters; the late rank stands before it.
CASE(a_rank_that_is_late_at_the_wrap_of_phases) {
    constexpr HostSegment::Counters kLast{.phase = std::numeric_limits<std::uint64_t>::max()};
    check_named({collective, nullptr}, "no sign of rank 1, which has not made call number 7", kLast);
    check_named({collective, collective, nullptr}, "no sign of rank 2, which has not made call number 7", kLast);
    const auto errors = errors_of({by_schedule, by_schedule, collective}, kLast);
    check_contains(errors[0], "no sign of rank 2, which is in call number 7");
}

CASE(a_rank_that_leaves_the_others_alone_in_a_call) {
    const auto errors = errors_of({by_schedule, by_schedule, collective});
    check_contains(errors[0], "no sign of rank 2, which is in call number 7");
    check_contains(errors[1], "no sign of rank 2, which is in call number 7");
}

CASE(chains_of_waits) {
    check_named({receive_from(1), nullptr}, "no sign of rank 1, which is blocked in no call");
    check_named({receive_from(1), after(200ms, receive_from(2)), nullptr}, "no sign of rank 2, ");
    check_named({send_to(1), receive_from(2), nullptr}, "no sign of rank 2, ");
    check_named({send_to(1), send_to(2), send_to(3), nullptr}, "no sign of rank 3, ");
    check_named({collective, collective, receive_from(3), nullptr}, "no sign of rank 3, ");
    check_named({receive_from(1), by_schedule, by_schedule, nullptr}, "no sign of rank 3, ");
    check_named({receive_from(PointToPoint::kAnyone), collective, nullptr}, "no sign of rank 2, ");
}

// The message that a rank waits for has come, and the rank does not take it: it is stopped.
CASE(a_rank_that_is_stopped_in_a_wait) {
    const auto errors = errors_of({
        receive_from(1),
        stopped_receive_from(2),
        [](HostSegment& host_segment) {
            std::byte data[8] = {};
            wait(host_segment, host_segment.p2p.send(1, 3, data, sizeof data, kTimeout, nullptr));
            receive_from(0)(host_segment);
        },
    });
    check_contains(errors[0], "no sign of rank 1, ");
    check_contains(errors[2], "no sign of rank 1, ");
}

CASE(deadlocks) {
    check_named({receive_from(1), receive_from(0)}, "deadlock, rank ");
    check_named({receive_from(1), collective}, "deadlock, rank ");
    check_named({send_to(1), send_to(2), send_to(0)}, "deadlock, rank ");
    const auto errors = errors_of({receive_from(1), receive_from(2), receive_from(1)});  // rank 0 is not part of it
    for (const auto& error : errors) CHECK(error.find("rank 0 waits") == std::string::npos);
}

// Two ranks wait for each other, but one of them is stopped: it has published its wait and has no heartbeat.
CASE(a_cycle_with_a_rank_that_is_stopped) {
    const auto errors = errors_of({receive_from(1), stopped_receive_from(0)});
    check_contains(errors[0], "no sign of rank 1, ");
}

// Heartbeats pass from 2^64 - 1 to 0 within the wait: a rank that goes on is not taken for one that is stopped.
CASE(deadlocks_and_stopped_ranks_at_the_wrap_of_heartbeats) {
    constexpr std::uint64_t kLast = std::numeric_limits<std::uint64_t>::max();
    for (const std::uint64_t left : {0u, 45u}) {  // the diagnosis begins after 40 heartbeats
        check_named({receive_from(1), receive_from(0)}, "deadlock, rank ", {.heartbeats = kLast - left});
        const auto errors = errors_of({receive_from(1), stopped_receive_from(0)}, {.heartbeats = kLast - left});
        check_contains(errors[0], "no sign of rank 1, ");
    }
}

// A collective of rank 1 waits on a thread of its queue, while its program does something else.
CASE(a_collective_in_the_background) {
    const auto errors = errors_of({
        receive_from(1),
        [](HostSegment& host_segment) {
            std::thread queue([&] {
                const BackgroundScope background;
                caught([&] { collective(host_segment); });
            });
            queue.join();
        },
    });
    check_contains(errors[0], "no sign of rank 1, ");
}

// A process that is a rank of three groups is blocked in the second one: the others report the rank that is late there.
CASE(a_rank_that_is_blocked_in_another_group) {
    constexpr int kRanks = 2, kOutside = 4711;
    std::vector<std::byte> memory(3 * WaitGraph::bytes(kRanks) + 64);
    auto* const place = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64);
    const auto groups = std::make_shared<WaitGraphs>();
    const auto position = [](int) { return WaitGraph::Position{}; };
    const auto is_blocked = [](int, const WaitGraph::Wait&) { return true; };
    const auto graph_at = [&](int number, int rank) {
        auto graph = std::make_unique<WaitGraph>(place + number * static_cast<long>(WaitGraph::bytes(kRanks)), rank, 2);
        graph->position_by(position);
        graph->verify_by(is_blocked);
        return graph;
    };
    const auto seen = graph_at(0, 1), mine = graph_at(0, 0), blocked = graph_at(1, 0);
    auto gone = graph_at(2, 0);
    seen->join(std::make_shared<WaitGraphs>(), [](int rank) { return rank + 1; });
    mine->join(groups, [](int rank) { return rank + 1; });
    blocked->join(groups, [](int rank) { return rank ? kOutside : 1; });
    gone->join(groups, [](int rank) { return rank + 1; });
    const auto before = seen->heartbeats();
    const WaitGraph::Wait for_rank_0{WaitGraph::WaitKind::kReceive, false, 0};
    {
        WaitGraph::Published published(*blocked);
        published.set({WaitGraph::WaitKind::kReceive, false, 1});
        CHECK(seen->find_late({for_rank_0}, before).ranks[0].rank == -kOutside);
        CHECK(seen->find_late({for_rank_0}, seen->heartbeats()).ranks[0].rank == 0);  // it is stopped
        gone.reset();
    }
    CHECK(seen->find_late({for_rank_0}, before).ranks[0].rank == 0);
    WaitGraph::Published failed(*blocked);
    {
        WaitGraph::Published published(*blocked);
        published.set({WaitGraph::WaitKind::kReceive, false, 1});
        published.fail();
    }
    CHECK(seen->find_late({for_rank_0}, seen->heartbeats()).ranks[0].rank == -kOutside);
    failed.set({WaitGraph::WaitKind::kReceive, true, 0});  // it waits again, for another reason
    CHECK(seen->find_late({for_rank_0}, before).ranks[0].rank == 0);
}

}  // namespace
