// Collectives whose data travels with the agreement, on groups of several hosts: threads over an in-memory network.
#include "../net/piggyback.h"

#include <cstdint>
#include <string>
#include <utility>

#include "in_memory_network.h"

using namespace dist_prims;
using namespace std::chrono_literals;

namespace {

using Values = std::vector<std::int64_t>;
using Hosted = std::vector<std::vector<int>>;

constexpr std::int64_t kUntouched = -7;

// What rank `source` sends to `target` at position i of the block; what all get is for rank 0.
std::int64_t value(int source, int target, std::size_t i) {
    return 1000 * source + 100 * target + static_cast<std::int64_t>(i);
}

// One collective on one rank: its inputs and outputs, by block, and what the outputs must be.
struct Example {
    Call call;
    std::vector<Values> inputs, outputs, expected;  // empty: none
    std::vector<std::size_t> counts;

    ProgramBuffer buffer() {
        ProgramBuffer found;
        for (std::size_t block = 0; block < counts.size(); ++block) {
            const auto address = [](Values& each) {
                return each.empty() ? nullptr : reinterpret_cast<std::byte*>(each.data());
            };
            found.blocks.push_back({address(inputs[block]), address(outputs[block]), counts[block]});
        }
        return found;
    }
    void give(std::size_t block, int source, int target) {
        for (std::size_t i = 0; i < counts[block]; ++i) inputs[block].push_back(value(source, target, i));
    }
    void expect(std::size_t block, const std::vector<int>& sources, int target) {
        expected[block].assign(counts[block], 0);
        for (const int source : sources) {
            for (std::size_t i = 0; i < counts[block]; ++i) expected[block][i] += value(source, target, i);
        }
        outputs[block].assign(counts[block], kUntouched);
    }
};

bool has_a_block_for_each_rank(Collective collective) {
    return collective != Collective::kAllReduce && collective != Collective::kBroadcast &&
           collective != Collective::kReduce;
}

// `counts`: the elements of each block, or of all.
Example example(Collective collective, int rank, int size, int root, std::vector<std::size_t> counts,
                std::uint64_t sequence) {
    const bool is_root = rank == root;
    const int lists = collective == Collective::kAllToAll ? 2 : 1;
    const auto blocks = static_cast<std::size_t>(has_a_block_for_each_rank(collective) ? lists * size : 1);
    if (counts.size() == 1) counts.assign(blocks, counts[0]);
    Example made{{}, std::vector<Values>(blocks), std::vector<Values>(blocks), std::vector<Values>(blocks), counts};
    made.call.sequence = sequence;
    made.call.collective = collective;
    made.call.dtype = DType::kInt64;
    made.call.root = root;
    made.call.op = Op::kSum;
    made.call.count = counts[0];
    std::vector<int> all;
    for (int each = 0; each < size; ++each) all.push_back(each);
    const auto mine = static_cast<std::size_t>(rank);
    switch (collective) {
        case Collective::kAllReduce:
        case Collective::kReduce:
            made.give(0, rank, 0);
            if (collective == Collective::kAllReduce || is_root) made.expect(0, all, 0);
            break;
        case Collective::kBroadcast:
            if (is_root) made.give(0, rank, 0);
            if (!is_root) made.expect(0, {root}, 0);
            break;
        case Collective::kAllGather:
        case Collective::kGather:
            made.give(mine, rank, 0);
            for (int source = 0; source < size; ++source) {
                if (collective == Collective::kAllGather || is_root)
                    made.expect(static_cast<std::size_t>(source), {source}, 0);
            }
            break;
        case Collective::kScatter:
        case Collective::kReduceScatter: {
            const bool reduces = collective == Collective::kReduceScatter;
            for (int target = 0; target < size; ++target) {
                if (reduces || is_root) made.give(static_cast<std::size_t>(target), rank, target);
            }
            made.expect(mine, reduces ? all : std::vector<int>{root}, rank);
            break;
        }
        case Collective::kAllToAll:
            for (int peer = 0; peer < size; ++peer) {
                made.give(static_cast<std::size_t>(peer), rank, peer);
                made.expect(static_cast<std::size_t>(size + peer), {peer}, rank);
            }
            break;
        case Collective::kBarrier:
            break;
    }
    return made;
}

constexpr std::array kAll{Collective::kAllReduce, Collective::kReduceScatter, Collective::kAllGather,
                          Collective::kBroadcast, Collective::kReduce,        Collective::kGather,
                          Collective::kScatter,   Collective::kAllToAll};

void moves(const Hosted& hosts, int size) {
    run_group(hosts, [size](MultiHostGroup& group, int rank) {
        std::uint64_t sequence = 0;
        for (const std::size_t count : {0u, 1u, 5u, 700u}) {
            for (const Collective collective : kAll) {
                const std::size_t blocks = has_a_block_for_each_rank(collective) ? static_cast<std::size_t>(size) : 1;
                if (!group.can_carry(collective, 8 * count * blocks)) continue;
                for (int root = 0; root < size; ++root) {
                    Example made = example(collective, rank, size, root, {count}, sequence++);
                    group.agree_and_move(made.call, made.buffer(), 60s);
                    CHECK(made.outputs == made.expected);
                }
            }
        }
    });
}

CASE(every_collective_can_travel_with_its_agreement) {
    moves({{0}, {1}}, 2);
    moves({{0, 1}, {2, 3}}, 4);
    moves({{0, 3, 4}, {1}, {2, 5}}, 6);
    moves({{3}, {2}, {1}, {0}}, 4);
}

// A leader reads its row where the blocks are, and writes its result there if it is alone on its host.
CASE(blocks_that_follow_each_other_in_memory_travel) {
    const auto joined = [](const std::vector<Values>& blocks) {
        Values values;
        for (const Values& block : blocks) values.insert(values.end(), block.begin(), block.end());
        return values;
    };
    run_group({{0, 3}, {1}, {2}}, [&](MultiHostGroup& group, int rank) {
        std::uint64_t sequence = 0;
        for (const Collective each : kAll) {
            Example made = example(each, rank, 4, 1, {6}, sequence++);
            Values inputs = joined(made.inputs), outputs = joined(made.outputs);
            auto* input = reinterpret_cast<std::byte*>(inputs.data());
            auto* output = reinterpret_cast<std::byte*>(outputs.data());
            ProgramBuffer buffer = made.buffer();
            for (auto& block : buffer.blocks) {
                if (block.input) block.input = std::exchange(input, input + 8 * block.count);
                if (block.output) block.output = std::exchange(output, output + 8 * block.count);
            }
            group.agree_and_move(made.call, buffer, 60s);
            CHECK(outputs == joined(made.expected));
        }
    });
}

// Between more hosts the second round forwards what was received in the first one.
CASE(the_same_data_for_all_travels_over_two_rounds) {
    moves({{0, 6}, {1}, {2}, {3}, {4}, {5}}, 7);
    run_group({{0}, {1}, {2}, {3}, {4}}, [](MultiHostGroup& group, int) {
        for (const Collective each : {Collective::kAllReduce, Collective::kBroadcast, Collective::kAllGather}) {
            CHECK(group.is_small(each, 1024));
            CHECK(!group.can_carry(each, 1032));
        }
        for (const Collective each : {Collective::kReduce, Collective::kGather, Collective::kScatter,
                                      Collective::kReduceScatter, Collective::kAllToAll})
            CHECK(!group.can_carry(each, 8));
    });
}

// In an all_gather, a reduce_scatter, and a scatter all ranks know the lengths of all blocks.
CASE(blocks_of_different_lengths_travel) {
    run_group({{0, 3}, {1}, {2}}, [](MultiHostGroup& group, int rank) {
        std::uint64_t sequence = 0;
        for (const Collective each : {Collective::kAllGather, Collective::kReduceScatter, Collective::kScatter}) {
            Example made = example(each, rank, 4, 2, {3, 0, 90, 1}, sequence++);
            made.call.count = 94;
            group.agree_and_move(made.call, made.buffer(), 60s);
            CHECK(made.outputs == made.expected);
        }
    });
}

CASE(the_most_data_that_can_travel) {
    constexpr std::size_t kMost = MultiHostGroup::kMostData;
    run_group({{0, 3}, {1}, {2}}, [](MultiHostGroup& group, int rank) {
        std::uint64_t sequence = 0;
        for (const Collective each : kAll) {
            const std::size_t blocks = has_a_block_for_each_rank(each) ? 4 : 1;
            const std::size_t most = each == Collective::kAllToAll ? kMost / 2 : kMost;  // two ranks on a host
            CHECK(group.can_carry(each, most) && !group.can_carry(each, most + 1));
            Example made = example(each, rank, 4, 3, {most / 8 / blocks}, sequence++);
            group.agree_and_move(made.call, made.buffer(), 60s);
            CHECK(made.outputs == made.expected);
        }
    });
}

// Ranks that disagree get the error, and their outputs stay what they are, whatever data was in the messages.
CASE(no_output_is_written_if_the_calls_differ) {
    run_group({{0, 3}, {1}, {2}}, [](MultiHostGroup& group, int rank) {
        std::uint64_t sequence = 0;
        for (const Collective each : kAll) {
            for (const int odd : {0, 1, 3}) {
                const std::size_t count = rank == odd ? 60 : 6;
                Example made = example(each, rank, 4, 1, {count}, sequence++);
                const std::vector<Values> before = made.outputs;
                CHECK(fails(CommError::Kind::kMismatch, [&] { group.agree_and_move(made.call, made.buffer(), 60s); }));
                CHECK(made.outputs == before);
            }
            Example made = example(each, rank, 4, 1, {6}, sequence++);
            group.agree_and_move(made.call, made.buffer(), 60s);
            CHECK(made.outputs == made.expected);
        }
    });
}

// The terms tell whether the ranks may use the data. A rank that has none agrees without it, also a leader.
CASE(no_output_is_written_if_the_terms_are_not_those_wanted) {
    run_group({{0, 3}, {1}, {2}}, [](MultiHostGroup& group, int rank) {
        for (const int odd : {0, 1, 3}) {
            Example made = example(Collective::kAllToAll, rank, 4, -1, {5}, static_cast<std::uint64_t>(odd));
            const std::vector<Values> before = made.outputs;
            const Terms wanted{0, 0, 4};
            const Terms found = rank == odd ? group.agree(made.call, 60s, {0, 1, 0})
                                            : group.agree_and_move(made.call, made.buffer(), 60s, {0, 0, 1}, wanted);
            CHECK(found == (Terms{0, 1, 3}));
            CHECK(made.outputs == before);
        }
    });
}

// Numbers of ranks and of bytes that differ from message to message: the memory of messages is used again.
CASE(messages_of_changing_sizes_travel) {
    run_group({{0}, {1, 2}, {3}}, [](MultiHostGroup& group, int rank) {
        for (std::uint64_t sequence = 0; sequence < 60; ++sequence) {
            const Collective each = kAll[sequence % kAll.size()];
            Example made = example(each, rank, 4, static_cast<int>(sequence % 4), {sequence * 37 % 500}, sequence);
            group.agree_and_move(made.call, made.buffer(), 60s);
            CHECK(made.outputs == made.expected);
            group.agree(sum_of(100 + sequence, 1), 60s);
        }
    });
}

}  // namespace
