// The core, with ranks as threads over one mapping: so that ThreadSanitizer sees every access to the shared memory, as
// it could not between processes. Built and run by tests/csrc/test_core_cpp.py, plain and under the sanitizers.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "../common/flight_recorder.h"
#include "../common/kernels.h"
#include "../common/packets.h"
#include "../common/queue.h"
#include "../net/router.h"
#include "../shm/collectives.h"
#include "../shm/host_segment.h"
#include "../shm/incremental_reduce.h"
#include "../shm/rendezvous.h"
#include "../shm/stamps.h"
#include "test_support.h"

using namespace dist_prims;
using namespace std::chrono_literals;

namespace {

void open(SlotExchange& slots, Collective collective, std::uint64_t sequence, std::uint64_t longest = 0) {
    Call call;
    call.collective = collective;
    call.sequence = sequence;
    call.longest = longest;
    slots.open(call, 60s);
}

std::int64_t value(int rank, std::size_t index) {
    return rank * 1000 + static_cast<std::int64_t>(index) * 3;
}

std::vector<std::int64_t> test_data(int rank, std::size_t count) {
    std::vector<std::int64_t> data(count);
    for (std::size_t index = 0; index < count; ++index) data[index] = value(rank, index);
    return data;
}

const std::byte* bytes(const std::vector<std::int64_t>& data) {
    return reinterpret_cast<const std::byte*>(data.data());
}
std::byte* bytes(std::vector<std::int64_t>& data) {
    return reinterpret_cast<std::byte*>(data.data());
}

// `sequence`: the number of the first call.
void every_collective(int size, const HostSegment::Counters& counters = {}, std::uint64_t sequence = 0) {
    run_ranks(size, counters, [size, first = sequence](HostSegment& host_segment) {
        SlotExchange& slots = host_segment.slots;
        std::uint64_t sequence = first;
        const int rank = slots.rank();
        const std::size_t n = static_cast<std::size_t>(size);
        for (std::size_t count : {0u, 1u, 13u, 500u, 5000u}) {
            auto data = test_data(rank, count);
            open(slots, Collective::kAllReduce, sequence++);
            all_reduce(host_segment, DType::kInt64, Op::kSum, bytes(data), bytes(data), count);
            for (std::size_t i = 0; i < count; ++i)
                CHECK(data[i] == size * (size - 1) / 2 * 1000 + size * 3 * static_cast<long>(i));

            const int root = static_cast<int>(count) % size;
            data = test_data(rank, count);
            open(slots, Collective::kBroadcast, sequence++);
            broadcast(slots, count * 8, root, bytes(data));
            CHECK(data == test_data(root, count));

            std::vector<std::vector<std::int64_t>> received(n, std::vector<std::int64_t>(count));
            Places places;
            for (auto& each : received) places.push_back(bytes(each));
            data = test_data(rank, count);
            open(slots, Collective::kAllGather, sequence++);
            all_gather(slots, bytes(data), places, Counts(n, count * 8));
            for (int peer = 0; peer < size; ++peer)
                CHECK(received[static_cast<std::size_t>(peer)] == test_data(peer, count));

            std::vector<std::vector<std::int64_t>> sent;
            Blocks blocks;
            for (int peer = 0; peer < size; ++peer) sent.push_back(test_data(10 * rank + peer, count));
            for (const auto& each : sent) blocks.push_back(bytes(each));
            open(slots, Collective::kAllToAll, sequence++, count * 8);
            all_to_all(slots, blocks, Counts(n, count * 8), places, Counts(n, count * 8));
            for (int peer = 0; peer < size; ++peer)
                CHECK(received[static_cast<std::size_t>(peer)] == test_data(10 * peer + rank, count));

            std::vector<std::int64_t> own(count);
            open(slots, Collective::kReduceScatter, sequence++);
            reduce_scatter(slots, DType::kInt64, Op::kMax, blocks, bytes(own), Counts(n, count));
            CHECK(own == test_data(10 * (size - 1) + rank, count));

            open(slots, Collective::kGather, sequence++, count * 8);
            gather(slots, root, bytes(data), count * 8, rank == root ? places : Places(), Counts(n, count * 8));
            for (int peer = 0; rank == root && peer < size; ++peer)
                CHECK(received[static_cast<std::size_t>(peer)] == test_data(peer, count));

            open(slots, Collective::kScatter, sequence++);
            scatter(slots, root, rank == root ? blocks : Blocks(), bytes(own), count * 8);
            CHECK(own == test_data(10 * root + rank, count));
        }
    });
}

// Data of which all, some or no tensors are shared: the result is the same.
void all_reduce_of_shared_tensors(int size, int exporters) {
    run_ranks(size, [=](HostSegment& host_segment) {
        const std::size_t count = 20000;
        const int rank = host_segment.membership.rank();
        for (std::uint64_t turn = 0; turn < 3; ++turn) {  // new memory each time
            std::vector<std::int64_t> own(count);
            std::byte* mapped = Exporter::instance().allocate(count * 8);
            std::byte* data = rank < exporters ? mapped : bytes(own);
            std::memcpy(data, test_data(rank, count).data(), count * 8);
            Call call;
            call.collective = Collective::kAllReduce;
            call.sequence = turn;
            call.tensor_ref = Exporter::instance().ref_of(data, count * 8);
            CHECK(call.tensor_ref.is_shared() == (rank < exporters));
            host_segment.slots.open(call, 60s);
            all_reduce(host_segment, DType::kInt64, Op::kSum, data, data, count, call.tensor_ref);
            for (std::size_t i = 0; i < count; i += 7) {
                const auto sum = size * (size - 1) / 2 * 1000 + size * 3 * static_cast<std::int64_t>(i);
                CHECK(reinterpret_cast<std::int64_t*>(data)[i] == sum);
            }
            Exporter::instance().release(mapped);
        }
    });
}

// A sum that begins before all of the data is there; the pieces come in any order.
void incremental_sums(int size, bool reachable) {
    run_ranks(size, [=](HostSegment& host_segment) {
        const std::size_t count = 30001, pieces = 600;  // more than can be stamped
        const int rank = host_segment.membership.rank();
        std::mt19937 random(static_cast<unsigned>(rank));
        const auto release = [](std::byte* data) { Exporter::instance().release(data); };
        const std::shared_ptr<std::byte> owner(Exporter::instance().allocate(count * 8), release);
        std::byte* const mapped = owner.get();
        auto* sums = reinterpret_cast<double*>(mapped);
        const auto budget = std::make_shared<Budget>(rank == 1 ? 2000 : count * 8);  // of some pieces, or of all
        IncrementalReduce incremental(mapped, count * 8, DType::kFloat64, rank, size, budget, owner);
        const auto edge = [=](std::size_t piece) { return piece * count / pieces; };
        const auto put = [&](std::size_t piece, double factor) {
            const auto data = std::make_shared<std::vector<double>>(edge(piece + 1) - edge(piece));
            for (std::size_t i = 0; i < data->size(); ++i) (*data)[i] = static_cast<double>(rank + 1 + edge(piece) + i);
            incremental.put(piece, {{edge(piece) * 8, edge(piece + 1) * 8},
                                    reinterpret_cast<const std::byte*>(data->data()),
                                    factor,
                                    std::shared_ptr<const void>(data, data->data())});
            CHECK(budget->used <= budget->limit);
        };
        put(0, 7);  // the round is discarded and begins again
        CHECK(!incremental.is_published());
        incremental.discard();
        for (std::uint64_t turn = 0; turn < 5; ++turn) {
            std::vector<std::size_t> order(pieces);
            std::iota(order.begin(), order.end(), 0);
            if (turn % 2) std::shuffle(order.begin(), order.end(), random);
            for (const std::size_t piece : order) put(piece, 0.5);
            CHECK(incremental.is_published() == (turn > 0 && reachable));
            Call call;
            call.collective = Collective::kAllReduce;
            call.sequence = turn;
            call.tensor_ref = Exporter::instance().ref_of(mapped, count * 8);
            if (!reachable && rank == size - 1) ++call.tensor_ref.file.device;  // another file has that descriptor
            host_segment.slots.open(call, 60s);
            incremental.finish(host_segment);
            CHECK(budget->used == 0);
            for (std::size_t i = 0; i < count; ++i)
                CHECK(sums[i] == 0.5 * size * ((size + 1) / 2.0 + static_cast<double>(i)));
        }
        put(1, 2);
        if (reachable) return;  // in the middle of a round
        incremental.copy_deferred();
        CHECK(sums[edge(1)] == 2 * static_cast<double>(rank + 1 + edge(1)));
    });
}

CASE(a_mismatch_is_reported) {
    run_ranks(3, [](HostSegment& host_segment) {
        SlotExchange& slots = host_segment.slots;
        open(slots, slots.rank() == 1 ? Collective::kBroadcast : Collective::kBarrier, 0);
        CHECK(fails(CommError::Kind::kMismatch, [&] { barrier(slots); }, "rank 1 calls broadcast"));
        open(slots, Collective::kBarrier, 1);
        barrier(slots);
    });
}

CASE(a_rank_that_leaves_is_reported) {
    run_ranks(2, [](HostSegment& host_segment) {
        SlotExchange& slots = host_segment.slots;
        if (slots.rank() == 1) {
            std::this_thread::sleep_for(300ms);
            return;  // leaves
        }
        open(slots, Collective::kBarrier, 0);
        CHECK(fails(CommError::Kind::kPeerLeft, [&] { barrier(slots); }));
    });
}

CASE(queue_keeps_the_order) {
    const auto queue = std::make_shared<Queue>();
    std::vector<int> done;
    std::vector<Queue::Handle> jobs;
    for (int number = 0; number < 200; ++number) {
        auto job = std::make_shared<Queue::Job>();
        job->run = [&done, number] { done.push_back(number); };
        job->done = [](std::exception_ptr error) {
            CHECK(!error);
            return std::function<void()>();
        };
        jobs.push_back(job);
        if (number % 3 == 0)
            queue->run(job, {});
        else
            queue->submit(job);
        if (number % 7 == 0) CHECK(queue->wait(job, 60s, {}));
    }
    for (const auto& job : jobs) CHECK(queue->wait(job, 60s, {}));
    for (int number = 0; number < 200; ++number) CHECK(done[static_cast<std::size_t>(number)] == number);
    queue->close(nullptr, {});
}

// A callback on the end of a job may wait for another job, which another thread runs.
CASE(queue_callback_that_waits) {
    const auto queue = std::make_shared<Queue>();
    std::atomic<int> done{0};
    std::vector<Queue::Handle> jobs;
    for (int number = 0; number < 4; ++number) {
        auto job = std::make_shared<Queue::Job>();
        job->run = [&done] { ++done; };
        job->done = [&done, number](std::exception_ptr) -> std::function<void()> {
            if (number != 0) return {};
            return [&done] {
                while (done < 4) std::this_thread::yield();
            };
        };
        jobs.push_back(job);
    }
    for (const auto& job : jobs) queue->submit(job);
    for (const auto& job : jobs) CHECK(queue->wait(job, 60s, {}));
    queue->close(nullptr, {});
}

PointToPoint::Done quietly() {
    return [](std::exception_ptr error) {
        CHECK(!error);
        return std::function<void()>();
    };
}

// All ranks to all ranks, tags out of order, lengths from zero to many times the ring.
void messages_of_all_lengths(int size, bool carried, const HostSegment::Counters& counters = {}) {
    run_ranks(size, counters, [&](HostSegment& host_segment) {
        const int rank = host_segment.membership.rank();
        const std::vector<std::size_t> counts{0, 1, 13, 3000, 100000};
        std::vector<std::vector<std::int64_t>> sent, received;
        std::vector<PointToPoint::Handle> requests;
        sent.reserve(1000);
        received.reserve(1000);
        const auto done = [&] { return carried ? quietly() : PointToPoint::Done(); };
        for (int peer = 0; peer < size; ++peer) {
            for (std::size_t tag = 0; tag < counts.size(); ++tag) {
                sent.push_back(test_data(100 * rank + peer, counts[tag]));
                requests.push_back(host_segment.p2p.send(peer, tag, bytes(sent.back()), counts[tag] * 8, 60s, done()));
            }
        }
        for (std::size_t tag = counts.size(); tag-- > 0;) {  // the last one first
            for (int peer = 0; peer < size; ++peer) {
                received.emplace_back(counts[tag]);
                requests.push_back(
                    host_segment.p2p.receive(peer, tag, bytes(received.back()), counts[tag] * 8, 60s, done()));
            }
        }
        for (const auto& request : requests) {
            while (carried && !host_segment.p2p.is_finished(request)) std::this_thread::sleep_for(1ms);
            CHECK(host_segment.p2p.wait(request, 60s));
            CHECK(!request->error);
        }
        std::size_t next = 0;
        for (std::size_t tag = counts.size(); tag-- > 0;) {
            for (int peer = 0; peer < size; ++peer)
                CHECK(received[next++] == test_data(100 * peer + rank, counts[tag]));
        }
    });
}

CASE(messages_from_any_rank) {
    run_ranks(4, [](HostSegment& host_segment) {
        std::int64_t value = host_segment.membership.rank();
        auto* data = reinterpret_cast<std::byte*>(&value);
        if (host_segment.membership.rank() != 0) {
            CHECK(host_segment.p2p.wait(host_segment.p2p.send(0, 7, data, 8, 60s, {}), 60s));
            return;  // and leave: what was sent is still to be had
        }
        std::vector<bool> seen(4);
        for (int each = 1; each < 4; ++each) {
            const auto request = host_segment.p2p.receive(PointToPoint::kAnyone, 7, data, 8, 60s, {});
            CHECK(host_segment.p2p.wait(request, 60s) && !request->error && request->peer == value);
            seen[static_cast<std::size_t>(value)] = true;
        }
        CHECK(seen[1] && seen[2] && seen[3]);
        const auto never = host_segment.p2p.receive(PointToPoint::kAnyone, 7, data, 8, 60s, {});
        CHECK(host_segment.p2p.wait(never, 60s));
        CHECK(never->error);  // all others have left
    });
}

CASE(a_message_that_does_not_fit) {
    run_ranks(2, [](HostSegment& host_segment) {
        std::int64_t value[2] = {1, 2};
        auto* data = reinterpret_cast<std::byte*>(value);
        const bool first = host_segment.membership.rank() == 0;
        const auto request =
            first ? host_segment.p2p.send(1, 3, data, 16, 60s, {}) : host_segment.p2p.receive(0, 3, data, 8, 60s, {});
        CHECK(host_segment.p2p.wait(request, 60s));
        CHECK(first == !request->error);
        const auto next =
            first ? host_segment.p2p.send(1, 3, data, 8, 60s, {}) : host_segment.p2p.receive(0, 3, data, 8, 60s, {});
        CHECK(host_segment.p2p.wait(next, 60s) && !next->error);
    });
}

int connect_to_rendezvous(const std::string& word) {
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    const std::string text = "dist_prims-" + word;
    std::memcpy(name.sun_path + 1, text.data(), text.size());
    const int peer = ::socket(AF_UNIX, SOCK_SEQPACKET, 0);
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
    return ::connect(peer, reinterpret_cast<sockaddr*>(&name), length) == 0 ? peer : (::close(peer), -1);
}

// A Hello of rendezvous.cpp in which a few bits are wrong, its magic number, word, process and rank; the word never is
// that of the rendezvous.
std::vector<std::byte> mutated_hello(std::mt19937& random) {
    const std::string begin = std::string("dist_prims 2").append(4, '\0').append(32, 'a');
    std::vector<std::byte> hello(begin.size() + sizeof(ProcessId) + sizeof(std::int64_t) + 16 * (random() % 3));
    std::memcpy(hello.data(), begin.data(), begin.size());
    hello[begin.size() + sizeof(ProcessId)] = std::byte{1};
    for (auto flips = random() % 4; flips > 0; --flips)
        hello[random() % hello.size()] ^= static_cast<std::byte>(1u << random() % 8);
    return hello;
}

std::vector<std::byte> random_bytes(std::mt19937& random) {
    std::vector<std::byte> garbage(1 + random() % 200);
    for (std::byte& each : garbage) each = static_cast<std::byte>(random());
    return garbage;
}

// Connections that send garbage of any length, or nothing, do not disturb the rendezvous, and the descriptors that they
// attach are closed. DIST_PRIMS_TEST_HELLOS: how many.
CASE(rendezvous_rejects_garbage) {
    const char* const given = std::getenv("DIST_PRIMS_TEST_HELLOS");
    const int hellos = given ? std::atoi(given) : 2000;
    std::atomic<bool> reported{false};
    std::string word;
    RendezvousOptions how{.rank = 0, .size = 2, .names = {}, .timeout = 300s};
    std::thread host([&] {
        const auto tell = [&](const std::string& text) {
            word = text;
            reported.store(true, std::memory_order_release);
        };
        CHECK(host_rendezvous(how, reserved_memory(8192), tell).memory.get() >= 0);
    });
    while (!reported.load(std::memory_order_acquire)) std::this_thread::yield();
    std::mt19937 random(1);
    const std::size_t descriptors = open_descriptors();
    std::size_t bytes = resident_bytes();
    for (int number = 0; number < hellos; ++number) {
        const int peer = connect_to_rendezvous(word);
        CHECK(peer >= 0);
        const Descriptor socket(peer);
        if (number % 16 == 0) continue;
        const auto garbage = number % 2 ? mutated_hello(random) : random_bytes(random);
        CHECK(send_packet(socket, garbage, {number % 3 ? std::vector<int>{} : std::vector<int>{0, 1}}) == 0);
        if (number == hellos / 10) bytes = resident_bytes();
    }
    CHECK(resident_bytes() <= bytes + (4 << 20));
    RendezvousOptions own = how;
    own.rank = 1;
    const RendezvousResult attached = join_rendezvous(own, [&] { return word; });
    CHECK(Mapping(attached.memory).size() == 8192);
    host.join();
    CHECK(open_descriptors() < descriptors + 8);  // those of the two ranks
}

CASE(collectives_of_all_sizes) {
    for (int size : {1, 2, 3, 4, 7}) every_collective(size);
}

// Writes from a measurement to the next, and long ones on both sides of it.
CASE(shared_writes_of_all_lengths) {
    constexpr std::size_t kLong = SharedWriter::kLongWrite;
    std::vector<std::byte> from(4 * kLong), to(from.size());
    for (std::size_t at = 0; at < from.size(); ++at) from[at] = static_cast<std::byte>(at * 37 >> 3);
    for (const bool past_cache : {false, true}) {
        SharedWriter writer;
        for (std::uint32_t number = 0; number < 2 * SharedWriter::kInterval; ++number) {
            for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, kLong - 1, kLong, 3 * kLong + number}) {
                std::fill(to.begin(), to.end(), std::byte{0});
                if (number % SharedWriter::kInterval) writer.set_past_cache(past_cache);
                writer.write(to.data() + number, from.data() + 2 * number, bytes);
                CHECK(std::equal(to.begin() + number, to.begin() + number + bytes, from.begin() + 2 * number));
                CHECK(std::count(to.begin(), to.begin() + number, std::byte{0}) == number);
                CHECK(std::all_of(to.begin() + number + bytes, to.end(),
                                  [](std::byte rest) { return rest == std::byte{0}; }));
            }
        }
    }
}

// Where the cores share a cache, no measurement chooses the copy past it. The other tests would not run that copy
// there.
CASE(collectives_past_the_cache) {
    for (int size : {1, 2, 3}) {
        run_ranks(
            size, {},
            [size](HostSegment& host_segment) {
                constexpr std::size_t kCount = 60000;
                SlotExchange& slots = host_segment.slots;
                for (std::uint64_t sequence = 0; sequence < 8; sequence += 2) {
                    slots.writer().set_past_cache(true);
                    auto data = test_data(slots.rank(), kCount);
                    open(slots, Collective::kAllReduce, sequence);
                    all_reduce(host_segment, DType::kInt64, Op::kSum, bytes(data), bytes(data), kCount);
                    for (std::size_t i = 0; i < kCount; ++i)
                        CHECK(data[i] == size * (size - 1) / 2 * 1000 + size * 3 * static_cast<long>(i));
                    data = test_data(slots.rank(), kCount);
                    open(slots, Collective::kBroadcast, sequence + 1);
                    broadcast(slots, kCount * 8, size - 1, bytes(data));
                    CHECK(data == test_data(size - 1, kCount));
                }
            },
            std::size_t{1} << 20);
    }
}

// Times in both states of a machine whose cores share their last cache at some times only.
CASE(a_writer_goes_past_the_cache_where_that_gains) {
    CHECK(!SharedWriter::goes_past_cache(531ns, 1883ns));
    CHECK(!SharedWriter::goes_past_cache(1170ns, 1000ns));
    CHECK(SharedWriter::goes_past_cache(4046ns, 2003ns));
    CHECK(SharedWriter::goes_past_cache(5959ns, 711ns));
}

CASE(all_reduce_with_shared_and_ordinary_tensors) {
    for (int size : {1, 2, 3}) {
        for (int exporters = 0; exporters <= size; ++exporters) all_reduce_of_shared_tensors(size, exporters);
    }
}

CASE(incremental_sums_in_any_order) {
    for (int size : {1, 2, 3}) incremental_sums(size, true);
}

CASE(incremental_sums_that_a_peer_cannot_map) {
    for (int size : {2, 3}) incremental_sums(size, false);
}

// The counters begin near the ends of 32, 63 and 64 bits. A collective of 5000 elements takes some ten phases.
CASE(collectives_over_the_wrap_of_phases) {
    for (const std::uint64_t end : {std::uint64_t{1} << 32, std::uint64_t{1} << 63, std::uint64_t{0}}) {
        for (const std::uint64_t left : {1u, 2u, 30u, 75u}) {
            for (int size : {1, 2, 3, 4}) every_collective(size, {.phase = end - left});
        }
    }
}

// Eight calls from the fourth last number on: the ranks compare the numbers, and the errors name them.
CASE(collectives_over_the_wrap_of_call_numbers) {
    constexpr std::uint64_t kLast = std::numeric_limits<std::uint64_t>::max();
    for (int size : {1, 2, 3}) every_collective(size, {}, kLast - 3);
    run_ranks(2, [](HostSegment& host_segment) {
        SlotExchange& slots = host_segment.slots;
        open(slots, Collective::kBarrier, slots.rank() == 0 ? kLast : 0);
        const std::string error = text_of(caught([&] { barrier(slots); }));
        check_contains(error, "barrier() as call number 0");
        check_contains(error, "barrier() as call number 18446744073709551615");
    });
}

// The recorder keeps the last entries, and finds each by its number, across the wrap from 2^64 - 1 to 0.
CASE(flight_records_over_the_wrap_of_entries) {
    constexpr std::uint64_t kFirst = std::numeric_limits<std::uint64_t>::max() - 1;
    FlightRecorder recorder(kFirst);
    const auto record = [&] { return recorder.json(0, "0", "", "[0]"); };
    const auto count = [&](const std::string& part) {
        const std::string text = record();
        std::size_t found = 0;
        for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) ++found;
        return found;
    };
    CHECK(count("record_id") == 0);
    for (std::uint64_t each = 0; each < 4; ++each) {
        const std::uint64_t id = recorder.add({.sequence = each, .title = "call"}, false);
        CHECK(id == kFirst + each);
        recorder.start(id);
        if (each != 2) recorder.end(id, true);
        CHECK(count("record_id") == each + 1);
    }
    CHECK(count("completed\"") == 3 && count("started\"") == 1);
    CHECK(record().find("18446744073709551614") < record().find("18446744073709551615"));
    CHECK(record().find("18446744073709551615") < record().find("\"record_id\": 0,"));
    for (std::uint64_t each = 4; each < 1030; ++each) recorder.add({.sequence = each, .title = "call"}, true);
    recorder.end(kFirst, false);  // it is overwritten
    CHECK(count("record_id") == 1024 && count("failed") == 0 && count("started\"") == 1024);
}

// A ring buffer of 256 KiB is that of up to 4 ranks; that of 5 or 7 has a length that is no power of two.
CASE(messages_over_the_wrap_of_ring_positions) {
    for (const std::uint64_t end : {std::uint64_t{1} << 32, std::uint64_t{1} << 63, std::uint64_t{0}}) {
        for (int size : {2, 3, 5, 7}) {
            const bool carried = size % 3 == 2;  // 2 and 5
            messages_of_all_lengths(size, carried, {.ring = end - (20 << 10)});
        }
    }
}

// Each time the wake comes between the registration of the sleeper and its sleep, which then returns at once. If the
// kernel could not tell the wake counts apart, each sleep would last 10 ms.
CASE(no_wake_up_is_lost_at_the_wrap_of_wake_counts) {
    constexpr std::uint32_t kTurns = 1000;
    const auto memory = memory_for(2, kSlot, {.wakes = std::numeric_limits<std::uint32_t>::max() - kTurns / 2});
    Membership sleeper(memory, memory->data(), 0, 2), waker(memory, memory->data(), 1, 2);
    const auto began = Clock::now();
    for (std::uint32_t turn = 0; turn < kTurns; ++turn) {
        sleeper.sleep([&] {
            waker.wake(0);
            return false;
        });
    }
    CHECK(Clock::now() - began < kTurns / 4 * 10ms);
}

// A stamp is a random token plus the number of the round. A sum of 0, as in new memory, was taken for a stamp.
CASE(no_stamp_is_zero) {
    run_ranks(3, [](HostSegment& host_segment) {
        SlotExchange& slots = host_segment.slots;
        Stamps stamps(std::numeric_limits<std::uint64_t>::max());
        open(slots, Collective::kBarrier, 0);
        stamps.announce(slots);
        slots.phase();
        const Stamps::All all = stamps.map_tensors(host_segment, Stamps::announced(slots));
        CHECK(all.tokens.size() == 3);
        for (std::uint64_t turn = 0; turn < 16; ++turn) {  // the first rounds of a sum, and the last
            const std::uint64_t round = turn < 8 ? turn + 1 : (std::uint64_t{1} << 63) - 16 + turn;
            CHECK(!all.are_set(0, round));
            slots.phase();
            stamps.set(0, round);
            slots.phase();
            CHECK(all.are_set(0, round));
            CHECK(!all.are_set(1, round));
            slots.phase();
        }
    });
}

// On one host a number is part of the tag, beside two flags. The messages of a segment are received last one first.
CASE(messages_over_the_end_of_segment_numbers) {
    constexpr std::uint64_t kBefore = 40, kCount = 80;
    const auto after = [](std::uint64_t number) { return Tags::segment_after(number); };
    CHECK(after(0) == 1 && after(Tags::kNumbers - 2) == Tags::kNumbers - 1 && after(Tags::kNumbers - 1) == 0);
    static_assert(Tags::kNumbers % Tags::kSegments == 0 && Tags::kNumbers < PointToPoint::kSignalFlag);
    run_ranks(3, [&](HostSegment& host_segment) {
        const int rank = host_segment.membership.rank();
        Router router(host_segment.p2p, {}, nullptr);
        std::vector<std::uint64_t> numbers{Tags::kNumbers - kBefore};
        while (numbers.size() < kCount) numbers.push_back(after(numbers.back()));
        const std::vector<std::uint64_t> sent = numbers;
        std::vector<std::uint64_t> received(kCount);
        std::vector<Router::RoutedRequest> requests;
        const auto place = [](const std::uint64_t& each) {
            return const_cast<std::byte*>(reinterpret_cast<const std::byte*>(&each));
        };
        for (std::size_t each = 0; each < kCount; ++each)
            requests.push_back(router.send((rank + 1) % 3, numbers[each], place(sent[each]), 8, 60s));
        for (std::size_t each = kCount; each-- > 0;)
            requests.push_back(router.receive((rank + 2) % 3, numbers[each], place(received[each]), 8, 60s));
        router.wait(requests);
        CHECK(received == sent);
    });
}

// The signals of windows have the numbers of their windows as tags, which begin again below the flag.
CASE(signals_over_the_end_of_window_numbers) {
    constexpr std::uint64_t kEnd = PointToPoint::kSignalFlag;
    run_ranks(2, [](HostSegment& host_segment) {
        std::vector<PointToPoint::Handle> requests;
        for (const std::uint64_t window : {kEnd - 2, kEnd - 1, kEnd, kEnd + 1}) {
            const PointToPoint::Tag tag = PointToPoint::signal_tag(window);
            const int peer = 1 - host_segment.membership.rank();
            requests.push_back(host_segment.p2p.send(peer, tag, nullptr, 0, 60s, {}));
            requests.push_back(host_segment.p2p.receive(peer, tag, nullptr, 0, 60s, {}));
            const std::string text = host_segment.p2p.text(*requests.back());
            check_contains(text, "wait_signal(from rank " + std::to_string(peer) + ", window " +
                                     std::to_string(window % kEnd) + ")");
        }
        for (const auto& request : requests) CHECK(host_segment.p2p.wait(request, 60s) && !request->error);
    });
}

CASE(messages_on_waiting_threads) {
    for (int size : {1, 2, 3, 5}) messages_of_all_lengths(size, false);
}

CASE(messages_on_the_progress_thread) {
    for (int size : {1, 2, 3, 5}) messages_of_all_lengths(size, true);
}

}  // namespace
