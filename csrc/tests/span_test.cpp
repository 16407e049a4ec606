// Groups that span hosts, all ranks as threads: each host is a room of its own, and the engine between them is a post
// office in memory.
#include "../core/span.h"

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>

#include "../core/plan.h"

using namespace dist_prims;
using namespace std::chrono_literals;

namespace {

#define CHECK(holds)                                                                   \
    if (!(holds)) {                                                                    \
        std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #holds); \
        std::abort();                                                                  \
    }

// Messages by sender, receiver and tag; like gloo's, a wait ends early when it is aborted, and with an error when the
// other rank has closed.
class Office {
public:
    using Address = std::tuple<int, int, int>;

    void put(const Address& where, const std::byte* data, std::size_t bytes) {
        const std::lock_guard lock(mutex);
        parcels[where].emplace_back(data, data + bytes);
        changed.notify_all();
    }
    void close(int rank) {
        const std::lock_guard lock(mutex);
        closed[rank] = true;
        changed.notify_all();
    }

    std::mutex mutex;
    std::condition_variable changed;
    std::map<Address, std::deque<std::vector<std::byte>>> parcels;
    std::map<int, bool> closed;
};

class Counter : public Engine {
public:
    Counter(Office& office, int rank) : office_(office), rank_(rank) {}
    ~Counter() override { office_.close(rank_); }

    Handle send(int to, int tag, const std::byte* data, std::size_t bytes) override {
        office_.put({rank_, to, tag}, data, bytes);
        return std::make_unique<Sent>();
    }
    Handle receive(int from, int tag, std::byte* data, std::size_t bytes) override {
        return std::make_unique<Awaited>(office_, from, rank_, tag, data, bytes);
    }

private:
    struct Sent : Letter {
        bool wait(std::chrono::milliseconds) override { return true; }
        bool is_done() override { return true; }
        void abort() override {}
    };
    struct Awaited : Letter {
        Awaited(Office& office, int from, int to, int tag, std::byte* data, std::size_t bytes)
            : office(office), from(from), to(to), tag(tag), data(data), bytes(bytes) {}

        bool take() {
            for (auto& [where, waiting] : office.parcels) {
                const auto& [sender, receiver, label] = where;
                if (receiver != to || label != tag || waiting.empty() || (from >= 0 && sender != from)) continue;
                CHECK(waiting.front().size() == bytes);
                std::memcpy(data, waiting.front().data(), bytes);
                waiting.pop_front();
                return true;
            }
            return false;
        }
        bool wait(std::chrono::milliseconds limit) override {
            std::unique_lock lock(office.mutex);
            const auto until = Clock::now() + limit;
            while (!take()) {
                if (std::exchange(aborted, false)) return false;
                if (from >= 0 && office.closed[from]) throw Broken("connection closed");
                if (office.changed.wait_until(lock, until) == std::cv_status::timeout) throw Broken("time is up");
            }
            return true;
        }
        bool is_done() override {
            const std::lock_guard lock(office.mutex);
            for (const auto& [where, waiting] : office.parcels) {
                if (std::get<1>(where) == to && std::get<2>(where) == tag && !waiting.empty()) return true;
            }
            return false;
        }
        void abort() override {
            const std::lock_guard lock(office.mutex);
            aborted = true;
            office.changed.notify_all();
        }

        Office& office;
        const int from, to, tag;
        std::byte* const data;
        const std::size_t bytes;
        bool aborted = false;
    };

    Office& office_;
    const int rank_;
};

// Run `body(span, rank)` on a thread for each rank of the hosts.
template <typename Body>
void span(const std::vector<std::vector<int>>& hosts, const Body& body) {
    Office office;
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
        const auto memory = std::make_shared<const Mapping>(make_memory(Room::bytes(size, Span::kLeastSlot)));
        for (int seat = 0; seat < size; ++seat) {
            threads.emplace_back([&, host, here, size, seat, memory] {
                const int rank = here[static_cast<std::size_t>(seat)];
                Room room(memory, seat, size, Span::kLeastSlot, Names{here, titles});
                Span group(Hosts{hosts, host}, room, std::make_unique<Counter>(office, rank));
                body(group, rank);
            });
        }
    }
    for (std::thread& thread : threads) thread.join();
}

Call sum_of(std::uint64_t sequence, std::size_t count) {
    Call call;
    call.collective = Collective::kAllReduce;
    call.dtype = DType::kInt64;
    call.op = Op::kSum;
    call.sequence = sequence;
    call.count = count;
    return call;
}

// A ring over all ranks, as rank `me` goes through it: reduce_scatter, then all_gather.
Plan ring(int size, int me) {
    Plan plan{size, 0, {}};
    const auto at = [size](int number) { return ((number % size) + size) % size; };
    for (int step = 0; step < 2 * (size - 1); ++step) {
        const bool reduces = step < size - 1;
        const int sent = at(me - step), got = at(me - 1 - step);
        Plan::Step& now = plan.steps.emplace_back();
        now.sends.push_back({at(me + 1), {sent}, {sent}});
        now.receives.push_back({at(me - 1), {got}, {got}});
        now.writes.push_back({got, got, !reduces, {{at(me - 1), 0}}});
    }
    return plan;
}

void sums(const std::vector<std::vector<int>>& hosts, int size) {
    span(hosts, [size](Span& group, int rank) {
        const Plan plan = ring(size, rank);
        std::uint64_t sequence = 0;
        for (const std::size_t count : {0u, 1u, 5u, 100u, 3000u}) {
            for (const int segments : {1, 3}) {
                std::vector<std::int64_t> data(count);
                for (std::size_t i = 0; i < count; ++i) data[i] = rank + static_cast<std::int64_t>(i);
                auto* bytes = reinterpret_cast<std::byte*>(data.data());
                const Call call = sum_of(sequence++, count);
                if (group.is_small(count * 8)) {
                    group.all_reduce(call, bytes, bytes, 60s);
                } else {
                    group.agree(call, 60s);
                    execute(plan, group.route, call.dtype, call.op, {bytes, count}, segments, 60s);
                }
                for (std::size_t i = 0; i < count; ++i)
                    CHECK(data[i] == size * static_cast<std::int64_t>(i) + size * (size - 1) / 2);
            }
        }
    });
}

void a_difference_is_told_to_all() {
    span({{0, 3}, {1}, {2, 4}}, [](Span& group, int rank) {
        for (const int odd : {0, 1, 4}) {
            bool told = false;
            try {
                group.agree(sum_of(0, rank == odd ? 7 : 8), 60s);
            } catch (const CommError& error) {
                told = error.kind == CommError::Kind::kMismatch;
            }
            CHECK(told);
        }
        group.agree(sum_of(1, 8), 60s);
    });
}

// Rank 1 goes without a word in the middle; rank 2, whose turn it is then, hears of it from the others.
void one_who_goes_is_named() {
    span({{0}, {1}, {2}, {3}}, [](Span& group, int rank) {
        group.agree(sum_of(0, 1), 60s);
        if (rank == 1) return;
        try {
            for (std::uint64_t sequence = 1;; ++sequence) group.agree(sum_of(sequence, 1), 60s);
        } catch (const CommError& error) {
            CHECK(error.kind == CommError::Kind::kPeerDied);
            CHECK(std::string(error.what()).find("host 1") != std::string::npos);
        }
        group.far.end();
    });
}

// Rank 4 waits for 3, 3 for 2, 2 for 5 on its own host, and 5 for nobody: it is stopped. When rank 4 has no more
// patience all are to name it, those who came later, too. Rank 0 waits for 1, which only computes: silent as well, but
// not to blame. And rank 2, which waits for no other host, hears of it from another.
void one_who_is_silent_is_named() {
    constexpr int kAwaited[] = {1, -1, 5, 2, 3, -1}, kWaiting = 4;
    std::atomic<int> ended{0};
    span({{0}, {1}, {2, 5}, {3}, {4}}, [&](Span& group, int rank) {
        if (kAwaited[rank] < 0) {
            while (ended < kWaiting) std::this_thread::sleep_for(10ms);
            return;
        }
        if (rank != 4) std::this_thread::sleep_for(300ms);
        std::byte nothing{};
        try {
            const std::chrono::milliseconds timeout = rank == 4 ? 1500ms : 60s;
            const auto letter = group.route.receive(kAwaited[rank], group.route.next(), &nothing, 1, timeout);
            group.route.wait({letter});
            CHECK(false);
        } catch (const CommError& error) {
            CHECK(error.kind == CommError::Kind::kLost);
            CHECK(std::string(error.what()).find("rank 5") != std::string::npos);
        }
        group.far.end();
        ++ended;
    });
}

}  // namespace

void spans() {
    sums({{0}, {1}}, 2);
    sums({{0, 1}, {2, 3}}, 4);
    sums({{0, 2}, {1}, {3, 4}}, 5);
    a_difference_is_told_to_all();
    one_who_goes_is_named();
    one_who_is_silent_is_named();
}
