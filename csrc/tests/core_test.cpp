// The core, with ranks as threads over one mapping: so that ThreadSanitizer sees every access to the shared memory, as
// it could not between processes. Built and run by tests/test_core_cpp.py, plain and under the sanitizers.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "../core/attach.h"
#include "../core/collectives.h"
#include "../core/gradual.h"
#include "../core/kernels.h"
#include "../core/queue.h"
#include "../core/room.h"

using namespace dist_prims;
using namespace std::chrono_literals;

void spans();  // span_test.cpp

namespace {

#define CHECK(holds)                                                                   \
    if (!(holds)) {                                                                    \
        std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #holds); \
        std::abort();                                                                  \
    }

constexpr std::size_t kSlot = 1 << 12;  // small, so that much is several segments

// Run `body(room)` on as many threads as there are ranks.
template <typename Body>
void rooms(int size, Body body) {
    const Descriptor memory = make_memory(Room::bytes(size, kSlot));
    const auto mapping = std::make_shared<const Mapping>(memory);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
        threads.emplace_back([&, rank] {
            Room room(mapping, rank, size, kSlot);
            body(room);
        });
    }
    for (std::thread& thread : threads) thread.join();
}

template <typename Body>
void ranks(int size, Body body) {
    rooms(size, [&body](Room& room) { body(room.board); });
}

void open(Board& board, Collective collective, std::uint64_t sequence, std::uint64_t longest = 0) {
    Call call;
    call.collective = collective;
    call.sequence = sequence;
    call.longest = longest;
    board.open(call, 60s);
}

std::int64_t value(int rank, std::size_t index) {
    return rank * 1000 + static_cast<std::int64_t>(index) * 3;
}

std::vector<std::int64_t> held(int rank, std::size_t count) {
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

void every_collective(int size) {
    rooms(size, [size](Room& room) {
        Board& board = room.board;
        std::uint64_t sequence = 0;
        const int rank = board.rank();
        const std::size_t n = static_cast<std::size_t>(size);
        for (std::size_t count : {0u, 1u, 13u, 500u, 5000u}) {
            auto data = held(rank, count);
            open(board, Collective::kAllReduce, sequence++);
            all_reduce(room, DType::kInt64, Op::kSum, bytes(data), bytes(data), count);
            for (std::size_t i = 0; i < count; ++i)
                CHECK(data[i] == size * (size - 1) / 2 * 1000 + size * 3 * static_cast<long>(i));

            const int root = static_cast<int>(count) % size;
            data = held(rank, count);
            open(board, Collective::kBroadcast, sequence++);
            broadcast(board, count * 8, root, bytes(data));
            CHECK(data == held(root, count));

            std::vector<std::vector<std::int64_t>> received(n, std::vector<std::int64_t>(count));
            Places places;
            for (auto& each : received) places.push_back(bytes(each));
            data = held(rank, count);
            open(board, Collective::kAllGather, sequence++);
            all_gather(board, bytes(data), places, Counts(n, count * 8));
            for (int peer = 0; peer < size; ++peer)
                CHECK(received[static_cast<std::size_t>(peer)] == held(peer, count));

            std::vector<std::vector<std::int64_t>> sent;
            Blocks blocks;
            for (int peer = 0; peer < size; ++peer) sent.push_back(held(10 * rank + peer, count));
            for (const auto& each : sent) blocks.push_back(bytes(each));
            open(board, Collective::kAllToAll, sequence++, count * 8);
            all_to_all(board, blocks, Counts(n, count * 8), places, Counts(n, count * 8));
            for (int peer = 0; peer < size; ++peer)
                CHECK(received[static_cast<std::size_t>(peer)] == held(10 * peer + rank, count));

            std::vector<std::int64_t> own(count);
            open(board, Collective::kReduceScatter, sequence++);
            reduce_scatter(board, DType::kInt64, Op::kMax, blocks, bytes(own), Counts(n, count));
            CHECK(own == held(10 * (size - 1) + rank, count));

            open(board, Collective::kGather, sequence++, count * 8);
            gather(board, root, bytes(data), count * 8, rank == root ? places : Places(), Counts(n, count * 8));
            for (int peer = 0; rank == root && peer < size; ++peer)
                CHECK(received[static_cast<std::size_t>(peer)] == held(peer, count));

            open(board, Collective::kScatter, sequence++);
            scatter(board, root, rank == root ? blocks : Blocks(), bytes(own), count * 8);
            CHECK(own == held(10 * root + rank, count));
        }
    });
}

// Data that all ranks, some, or none lend: the result is the same.
void lent_memory(int size, int lenders) {
    rooms(size, [=](Room& room) {
        const std::size_t count = 20000;
        const int rank = room.peers.rank();
        for (std::uint64_t turn = 0; turn < 3; ++turn) {  // new memory each time
            std::vector<std::int64_t> own(count);
            std::byte* lent = Lender::instance().allocate(count * 8);
            std::byte* data = rank < lenders ? lent : bytes(own);
            std::memcpy(data, held(rank, count).data(), count * 8);
            Call call;
            call.collective = Collective::kAllReduce;
            call.sequence = turn;
            call.loan = Lender::instance().loan(data, count * 8);
            CHECK((call.loan.inode != 0) == (rank < lenders));
            room.board.open(call, 60s);
            all_reduce(room, DType::kInt64, Op::kSum, data, data, count, call.loan);
            for (std::size_t i = 0; i < count; i += 7) {
                const auto sum = size * (size - 1) / 2 * 1000 + size * 3 * static_cast<std::int64_t>(i);
                CHECK(reinterpret_cast<std::int64_t*>(data)[i] == sum);
            }
            Lender::instance().release(lent);
        }
    });
}

// A sum that begins before all of the data is there, whatever comes first, wherever.
void gradual_sums(int size, bool reachable) {
    rooms(size, [=](Room& room) {
        const std::size_t count = 30001, pieces = 600;  // more than can be stamped
        const int rank = room.peers.rank();
        std::mt19937 random(static_cast<unsigned>(rank));
        std::byte* lent = Lender::instance().allocate(count * 8);
        auto* sums = reinterpret_cast<double*>(lent);
        const auto budget = std::make_shared<Budget>(rank == 1 ? 2000 : count * 8);  // of some pieces, or of all
        Gradual gradual(lent, count * 8, DType::kFloat64, rank, size, budget);
        const auto edge = [=](std::size_t piece) { return piece * count / pieces; };
        const auto put = [&](std::size_t piece, double factor) {
            const auto data = std::make_shared<std::vector<double>>(edge(piece + 1) - edge(piece));
            for (std::size_t i = 0; i < data->size(); ++i) (*data)[i] = static_cast<double>(rank + 1 + edge(piece) + i);
            gradual.put(piece, {{edge(piece) * 8, edge(piece + 1) * 8},
                                reinterpret_cast<const std::byte*>(data->data()),
                                factor,
                                std::shared_ptr<const void>(data, data->data())});
            CHECK(budget->held <= budget->limit);
        };
        put(0, 7);  // it begins anew
        CHECK(!gradual.is_shown());
        gradual.forget();
        for (std::uint64_t turn = 0; turn < 5; ++turn) {
            std::vector<std::size_t> order(pieces);
            std::iota(order.begin(), order.end(), 0);
            if (turn % 2) std::shuffle(order.begin(), order.end(), random);
            for (const std::size_t piece : order) put(piece, 0.5);
            CHECK(gradual.is_shown() == (turn > 0 && reachable));
            Call call;
            call.collective = Collective::kAllReduce;
            call.sequence = turn;
            call.loan = Lender::instance().loan(lent, count * 8);
            if (!reachable && rank == size - 1) call.loan.descriptor = -1;
            room.board.open(call, 60s);
            gradual.finish(room);
            CHECK(budget->held == 0);
            for (std::size_t i = 0; i < count; ++i)
                CHECK(sums[i] == 0.5 * size * ((size + 1) / 2.0 + static_cast<double>(i)));
        }
        put(1, 2);
        if (reachable) return Lender::instance().release(lent);
        gradual.settle();
        CHECK(sums[edge(1)] == 2 * static_cast<double>(rank + 1 + edge(1)));
        Lender::instance().release(lent);
    });
}

void disagreement() {
    ranks(3, [](Board& board) {
        open(board, board.rank() == 1 ? Collective::kBroadcast : Collective::kBarrier, 0);
        bool told = false;
        try {
            barrier(board);
        } catch (const CommError& error) {
            told = error.kind == CommError::Kind::kMismatch && std::strstr(error.what(), "rank 1 calls broadcast");
        }
        CHECK(told);
        open(board, Collective::kBarrier, 1);
        barrier(board);
    });
}

void one_who_does_not_come() {
    ranks(2, [](Board& board) {
        if (board.rank() == 1) {
            std::this_thread::sleep_for(300ms);
            return;  // leaves
        }
        open(board, Collective::kBarrier, 0);
        bool told = false;
        try {
            barrier(board);
        } catch (const CommError& error) {
            told = error.kind == CommError::Kind::kPeerLeft;
        }
        CHECK(told);
    });
}

void order_of_a_queue() {
    Queue queue;
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
            queue.run(job, {});
        else
            queue.submit(job);
        if (number % 7 == 0) CHECK(queue.wait(job, 60s, {}));
    }
    for (const auto& job : jobs) CHECK(queue.wait(job, 60s, {}));
    for (int number = 0; number < 200; ++number) CHECK(done[static_cast<std::size_t>(number)] == number);
    queue.close(nullptr, {});
}

// Who is told that a job is done may wait for another one, which another thread runs.
void a_callback_that_waits() {
    Queue queue;
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
    for (const auto& job : jobs) queue.submit(job);
    for (const auto& job : jobs) CHECK(queue.wait(job, 60s, {}));
    queue.close(nullptr, {});
}

Mail::Done quietly() {
    return [](std::exception_ptr error) {
        CHECK(!error);
        return std::function<void()>();
    };
}

// Everyone to everyone, tags out of order, lengths from nothing to many times the lane.
void mail_of_all_lengths(int size, bool carried) {
    rooms(size, [&](Room& room) {
        const int rank = room.peers.rank();
        const std::vector<std::size_t> counts{0, 1, 13, 3000, 200000};
        std::vector<std::vector<std::int64_t>> sent, received;
        std::vector<Mail::Handle> letters;
        sent.reserve(1000);
        received.reserve(1000);
        const auto done = [&] { return carried ? quietly() : Mail::Done(); };
        for (int peer = 0; peer < size; ++peer) {
            for (std::size_t tag = 0; tag < counts.size(); ++tag) {
                sent.push_back(held(100 * rank + peer, counts[tag]));
                letters.push_back(room.mail.send(peer, tag, bytes(sent.back()), counts[tag] * 8, 60s, done()));
            }
        }
        for (std::size_t tag = counts.size(); tag-- > 0;) {  // the last one first
            for (int peer = 0; peer < size; ++peer) {
                received.emplace_back(counts[tag]);
                letters.push_back(room.mail.receive(peer, tag, bytes(received.back()), counts[tag] * 8, 60s, done()));
            }
        }
        for (const auto& letter : letters) {
            while (carried && !room.mail.is_finished(letter)) std::this_thread::sleep_for(1ms);
            CHECK(room.mail.wait(letter, 60s));
            CHECK(!letter->error);
        }
        std::size_t next = 0;
        for (std::size_t tag = counts.size(); tag-- > 0;) {
            for (int peer = 0; peer < size; ++peer) CHECK(received[next++] == held(100 * peer + rank, counts[tag]));
        }
    });
}

void mail_from_anyone() {
    rooms(4, [](Room& room) {
        std::int64_t value = room.peers.rank();
        auto* data = reinterpret_cast<std::byte*>(&value);
        if (room.peers.rank() != 0) {
            CHECK(room.mail.wait(room.mail.send(0, 7, data, 8, 60s, {}), 60s));
            return;  // and leave: what was sent is still to be had
        }
        std::vector<bool> seen(4);
        for (int each = 1; each < 4; ++each) {
            const auto letter = room.mail.receive(Mail::kAnyone, 7, data, 8, 60s, {});
            CHECK(room.mail.wait(letter, 60s) && !letter->error && letter->peer == value);
            seen[static_cast<std::size_t>(value)] = true;
        }
        CHECK(seen[1] && seen[2] && seen[3]);
        const auto never = room.mail.receive(Mail::kAnyone, 7, data, 8, 60s, {});
        CHECK(room.mail.wait(never, 60s));
        CHECK(never->error);  // all others have left
    });
}

void mail_that_does_not_fit() {
    rooms(2, [](Room& room) {
        std::int64_t value[2] = {1, 2};
        auto* data = reinterpret_cast<std::byte*>(value);
        const bool first = room.peers.rank() == 0;
        const auto letter = first ? room.mail.send(1, 3, data, 16, 60s, {}) : room.mail.receive(0, 3, data, 8, 60s, {});
        CHECK(room.mail.wait(letter, 60s));
        CHECK(first == !letter->error);
        const auto next = first ? room.mail.send(1, 3, data, 8, 60s, {}) : room.mail.receive(0, 3, data, 8, 60s, {});
        CHECK(room.mail.wait(next, 60s) && !next->error);
    });
}

int connect_to(const std::string& word) {
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    const std::string text = "dist_prims-" + word;
    std::memcpy(name.sun_path + 1, text.data(), text.size());
    const int peer = ::socket(AF_UNIX, SOCK_SEQPACKET, 0);
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
    return ::connect(peer, reinterpret_cast<sockaddr*>(&name), length) == 0 ? peer : (::close(peer), -1);
}

// Garbage of every length, and silence, do not keep the ranks from meeting.
void strangers(int hellos) {
    std::atomic<bool> told{false};
    std::string word;
    const auto deadline = Clock::now() + 300s;
    std::thread host([&] {
        const auto tell = [&](const std::string& text) {
            word = text;
            told.store(true, std::memory_order_release);
        };
        CHECK(host_memory(8192, 2, tell, deadline).get() >= 0);
    });
    while (!told.load(std::memory_order_acquire)) std::this_thread::yield();
    std::mt19937 random(1);
    for (int number = 0; number < hellos; ++number) {
        const int peer = connect_to(word);
        CHECK(peer >= 0);
        std::vector<char> garbage(1 + random() % 200);
        for (char& each : garbage) each = static_cast<char>(random());
        CHECK(::send(peer, garbage.data(), garbage.size(), MSG_NOSIGNAL) >= 0);
        ::close(peer);
    }
    const Descriptor memory = fetch_memory(1, [&] { return word; }, deadline);
    CHECK(Mapping(memory).size() == 8192);
    host.join();
}

}  // namespace

int main(int argc, char** argv) {
    for (int size : {1, 2, 3, 4, 7}) every_collective(size);
    for (int size : {1, 2, 3}) {
        for (int lenders = 0; lenders <= size; ++lenders) lent_memory(size, lenders);
        for (const bool reachable : {true, false}) gradual_sums(size, reachable);
    }
    disagreement();
    one_who_does_not_come();
    order_of_a_queue();
    a_callback_that_waits();
    for (int size : {1, 2, 3, 5}) {
        mail_of_all_lengths(size, false);
        mail_of_all_lengths(size, true);
    }
    mail_from_anyone();
    mail_that_does_not_fit();
    spans();
    strangers(argc > 1 ? std::atoi(argv[1]) : 2000);
    std::printf("ok, with %s\n", instruction_set());
}
