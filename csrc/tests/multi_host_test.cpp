// Groups that span hosts, all ranks as threads: each host has a segment of its own, and the transport between them is
// an in-memory network.
#include "../net/multi_host.h"

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "../net/schedule_executor.h"
#include "../tcp/transport.h"
#include "test_support.h"

using namespace dist_prims;
using namespace std::chrono_literals;

namespace {

// Carries the messages of all ranks. Like gloo and MPI it matches messages and receives in the order in which they are
// posted, and writes to the receiver's memory when the message comes. Like gloo's, a wait ends early when it is
// aborted, and with an error when the other rank has closed.
class InMemoryNetwork {
public:
    static constexpr int kLargestTag = 32767;  // the least that MPI guarantees

    struct Address {
        int from, to, tag;
        bool meets(const Address& message) const {
            return to == message.to && tag == message.tag && (from == Transport::kAnyone || from == message.from);
        }
    };
    struct Receive {
        Address address;
        std::byte* data;
        std::size_t bytes;
        Transport::Owner owner = nullptr;
        bool done = false;
    };

    // Like MPI, it cannot always give up a receive, and may write to its memory as long as it likes.
    ~InMemoryNetwork() {
        for (const auto& receive : kept_) std::memset(receive->data, 0xff, receive->bytes);
    }

    void send(const Address& address, const std::byte* data, std::size_t bytes) {
        const std::lock_guard lock(mutex);
        longest = std::max(longest, bytes);
        const Message message{address, {data, data + bytes}};
        for (auto each = receives_.begin(); each != receives_.end(); ++each) {
            if (!(*each)->address.meets(address)) continue;
            deliver(message, **each);
            receives_.erase(each);
            return;
        }
        messages_.push_back(message);
    }
    void post(const std::shared_ptr<Receive>& receive) {
        const std::lock_guard lock(mutex);
        for (auto each = messages_.begin(); each != messages_.end(); ++each) {
            if (!receive->address.meets(each->address)) continue;
            deliver(*each, *receive);
            messages_.erase(each);
            return;
        }
        receives_.push_back(receive);
    }
    void cancel(const std::shared_ptr<Receive>& receive) {
        const std::lock_guard lock(mutex);
        std::erase(receives_, receive);
        if (receive->owner && !receive->done) kept_.push_back(receive);
    }
    std::size_t kept() {
        const std::lock_guard lock(mutex);
        return kept_.size();
    }
    void close(int rank) {
        const std::lock_guard lock(mutex);
        closed[rank] = true;
        changed.notify_all();
    }

    std::mutex mutex;  // of all below
    std::condition_variable changed;
    std::map<int, bool> closed;
    std::size_t longest = 0;  // of the messages that were sent

private:
    struct Message {
        Address address;
        std::vector<std::byte> data;
    };

    void deliver(const Message& message, Receive& receive) {
        const bool may_be_shorter = Tags(kLargestTag).is_agreement(message.address.tag);
        CHECK(message.data.size() == receive.bytes || (may_be_shorter && message.data.size() < receive.bytes));
        if (!message.data.empty()) std::memcpy(receive.data, message.data.data(), message.data.size());
        receive.address.from = message.address.from;
        receive.done = true;
        changed.notify_all();
    }

    std::deque<Message> messages_;                   // for which no receive has been posted yet
    std::deque<std::shared_ptr<Receive>> receives_;  // which no message has met yet
    std::vector<std::shared_ptr<Receive>> kept_;     // which have been given up
};

class InMemoryTransport : public Transport {
public:
    static constexpr int kLargestTag = InMemoryNetwork::kLargestTag;

    InMemoryTransport(InMemoryNetwork& network, int rank) : network_(network), rank_(rank) {}
    ~InMemoryTransport() override { network_.close(rank_); }

    int largest_tag() const override { return kLargestTag; }

    Handle send(int to, int tag, const std::byte* data, std::size_t bytes, Owner) override {
        CHECK(tag >= 0 && tag <= kLargestTag);
        network_.send({rank_, to, tag}, data, bytes);
        return std::make_unique<Sent>();
    }
    Handle receive(int from, int tag, std::byte* data, std::size_t bytes, Owner owner) override {
        CHECK(tag >= 0 && tag <= kLargestTag);
        return std::make_unique<Awaited>(network_,
                                         InMemoryNetwork::Receive{{from, rank_, tag}, data, bytes, std::move(owner)});
    }

private:
    struct Sent : TransportRequest {
        bool wait(std::chrono::milliseconds) override { return true; }
        bool is_done() override { return true; }
        void abort() override {}
    };
    struct Awaited : TransportRequest {
        Awaited(InMemoryNetwork& network, const InMemoryNetwork::Receive& asked)
            : network(network), receive(std::make_shared<InMemoryNetwork::Receive>(asked)) {
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
                if (network.changed.wait_until(lock, until) == std::cv_status::timeout)
                    throw TransportError("time is up");
            }
            return true;
        }
        bool is_done() override {
            const std::lock_guard lock(network.mutex);
            return receive->done;
        }
        void abort() override {
            const std::lock_guard lock(network.mutex);
            aborted = true;
            network.changed.notify_all();
        }

        InMemoryNetwork& network;
        const std::shared_ptr<InMemoryNetwork::Receive> receive;
        bool aborted = false;
    };

    InMemoryNetwork& network_;
    const int rank_;
};

using MakeTransport = std::function<std::unique_ptr<Transport>(int rank)>;

// What a run leaves: receives that were given up, and the longest message in bytes.
struct NetworkUse {
    std::size_t kept, longest;
};

// Runs `body(group, rank)` on a thread for each rank of the hosts, over an in-memory network or another.
template <typename Body>
NetworkUse run_group(const std::vector<std::vector<int>>& hosts, const Body& body, MakeTransport make = nullptr) {
    InMemoryNetwork network;
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
                body(group, rank);
            });
        }
    }
    for (std::thread& thread : threads) thread.join();
    return {network.kept(), network.longest};
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

void sums(const std::vector<std::vector<int>>& hosts, int size, const MakeTransport& make = nullptr) {
    const auto body = [size](MultiHostGroup& group, int rank) {
        const RankProgram program = ring(size, rank);
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
    constexpr int kSize = 5;
    std::vector<TcpEndpoint> endpoints(kSize);
    std::vector<std::string> addresses;
    for (TcpEndpoint& each : endpoints) addresses.push_back(address_of(each.listening = listen_at("127.0.0.1")));
    sums({{0, 3}, {1}, {2, 4}}, kSize, [&](int rank) {
        TcpEndpoint& endpoint = endpoints[static_cast<std::size_t>(rank)];
        endpoint.addresses = addresses;
        return std::make_unique<TcpTransport>(std::move(endpoint), rank);
    });
}

// No two classes of messages share a tag, for any numbers of segments, and all tags are valid for the transport.
void tags_of_classes_differ(int largest) {
    const Tags tags(largest);
    std::set<int> found{tags.notice(), tags.unused(), tags.diagnosis(), tags.agreement()};
    CHECK(found.size() == 4);
    const std::uint64_t last = std::numeric_limits<std::uint64_t>::max();
    for (std::uint64_t each = 0; each < Tags::kSegments; ++each) {
        CHECK(tags.data(each) == tags.data(each + 3 * Tags::kSegments));
        found.insert({tags.data(each), tags.data(last - each)});
    }
    CHECK(found.size() == 4 + Tags::kSegments);
    CHECK(*found.begin() == tags.largest_of_users() + 1);
    CHECK(*found.rbegin() == largest);
    CHECK(tags.largest_of_users() > 0);
}

CASE(a_transport_with_too_few_tags_is_refused) {
    try {
        const Tags tags(1000);
        CHECK(false);
    } catch (const std::invalid_argument& error) {
        CHECK(std::string(error.what()).find("the tags 0 to 1000 only") != std::string::npos);
    }
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
                group.all_reduce(call, bytes, bytes, 60s);
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
            if (group.is_small(count * 2)) {
                group.all_reduce(call, bytes, bytes, 60s);
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
            std::string error;
            try {
                group.all_reduce(sum_of(0, data.size()), bytes, bytes, 60s);
            } catch (const CommError& caught) {
                error = caught.what();
            }
            for (const char* count : {"int64, 1 elements", "int64, 128 elements"})
                CHECK(error.find(count) != std::string::npos);
            CHECK(error.find("ank " + std::to_string(odd) + " calls") != std::string::npos);
        }
    });
}

CASE(an_agreement_sums_the_terms_of_all_ranks) {
    run_group({{0, 3}, {1}, {2, 4}}, [](MultiHostGroup& group, int rank) {
        for (std::uint64_t sequence = 0; sequence < 3; ++sequence) {
            const auto term = static_cast<std::uint64_t>(rank) - 2;  // wraps around
            CHECK(group.agree(sum_of(sequence, 1), 60s, {term + sequence, 1}) == (Terms{5 * sequence, 5}));
        }
        CHECK(fails(CommError::Kind::kMismatch, [&] { group.agree(sum_of(3, rank == 1 ? 7 : 8), 60s, {1, 0}); }));
        CHECK(group.agree(sum_of(4, 1), 60s, {1, 0}) == (Terms{5, 0}));
    });
}

// The leaders of the first two hosts measure, and all ranks learn what they have found. Two hosts with one network have
// no link.
CASE(all_ranks_learn_what_the_link_costs) {
    for (const bool is_one_network : {false, true}) {
        std::mutex mutex;
        std::set<std::uint64_t> found;
        run_group({{2, 3}, {0}, {1, 4}}, [&](MultiHostGroup& group, int rank) {
            const LinkCosts costs = group.begin(sum_of(0, 1), is_one_network || rank == 0 ? 7 : 8, 60s);
            CHECK((costs.alpha > 0 && costs.beta > 0) != is_one_network);
            CHECK(group.begin(sum_of(1, 1), 0, 60s).beta == 0);
            const std::lock_guard lock(mutex);
            found.insert(costs.packed());
        });
        CHECK(found.size() == 1);
    }
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
    const std::vector<std::vector<int>> hosts{{0, 5}, {1}, {2}, {3}, {4}};
    const auto longest = [&](std::size_t count) {
        return run_group(hosts,
                         [count](MultiHostGroup& group, int) {
                             std::vector<std::int64_t> data(count, 1);
                             auto* bytes = reinterpret_cast<std::byte*>(data.data());
                             if (count == 0) return void(group.agree(sum_of(0, 1), 60s));
                             group.all_reduce(sum_of(0, count), bytes, bytes, 60s);
                             for (const std::int64_t each : data) CHECK(each == 6);
                         })
            .longest;
    };
    CHECK(longest(0) == 2 * 32);  // of the three rounds, the second has two frames and the last one
    CHECK(longest(1) == 2 * (32 + 8));
    CHECK(longest(128) == 2 * (32 + 1024));
}

// Rank 1 leaves in the middle. Rank 2, which does not wait for it, learns of that from the others.
CASE(a_rank_that_leaves_is_named) {
    run_group({{0}, {1}, {2}, {3}}, [](MultiHostGroup& group, int rank) {
        group.agree(sum_of(0, 1), 60s);
        if (rank == 1) return;
        try {
            for (std::uint64_t sequence = 1;; ++sequence) group.agree(sum_of(sequence, 1), 60s);
        } catch (const CommError& error) {
            CHECK(error.kind == CommError::Kind::kPeerDied);
            CHECK(std::string(error.what()).find("host 1") != std::string::npos);
        }
        group.remote.end();
    });
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
        try {
            const std::chrono::milliseconds timeout = rank == 4 ? 1500ms : 60s;
            const auto request = group.router.receive(kAwaited[rank], group.router.next(), &nothing, 1, timeout);
            group.router.wait({request});
            CHECK(false);
        } catch (const CommError& error) {
            CHECK(error.kind == CommError::Kind::kLost);
            CHECK(std::string(error.what()).find("rank 5") != std::string::npos);
        }
        group.remote.end();
        ++ended;
    });
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
