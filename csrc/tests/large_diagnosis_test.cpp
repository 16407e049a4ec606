// Timeout diagnoses among more ranks than a test can make groups of: each rank is only its TimeoutDiagnosis, over an
// in-memory network.
#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "../net/timeout_diagnosis.h"
#include "in_memory_network.h"

using namespace dist_prims;
using namespace std::chrono_literals;

namespace {

const int kTag = Tags(InMemoryTransport::kLargestTag).diagnosis();

class ManyRanks {
public:
    // `dead`: a rank that takes no part.
    explicit ManyRanks(int size, int dead = -1) : size_(size), dead_(dead), diagnoses_(static_cast<std::size_t>(size)) {
        for (int rank = 0; rank < size; ++rank) {
            std::vector<int> others(static_cast<std::size_t>(size));
            std::iota(others.begin(), others.end(), 0);
            std::erase(others, rank);
            auto& transport = *transports_.emplace_back(std::make_unique<InMemoryTransport>(network_, rank));
            if (rank != dead)
                diagnoses_[static_cast<std::size_t>(rank)] =
                    std::make_unique<TimeoutDiagnosis>(transport, kTag, rank, others, [](const auto&) {});
        }
    }

    // Every rank waits for the next one, and times out. Returns when all ranks name the same cause.
    void name(const Membership::Notice& cause) {
        const auto names = [&](int rank) {
            if (rank == dead_) return true;
            // The first time, the rank announces for which rank it waits. It does not stay for replies.
            const auto named = diagnosis(rank).diagnose((rank + 1) % size_, [] { return true; });
            return named.kind == cause.kind && named.culprit == cause.culprit && named.other == cause.other;
        };
        for (int rank = 0; rank < size_; ++rank) names(rank);
        for (int rank = 0; rank < size_; ++rank) wait_until([&] { return names(rank); });
    }

    // For each rank the number of ranks to which it has sent messages, and the number of messages.
    std::vector<std::pair<int, int>> sent() {
        std::vector<std::pair<int, int>> sent(static_cast<std::size_t>(size_));
        const std::lock_guard lock(network_.mutex);
        for (const auto& [link, messages] : network_.control_messages) {
            auto& [links, all_messages] = sent[static_cast<std::size_t>(link.first)];
            ++links;
            all_messages += messages;
        }
        return sent;
    }

private:
    TimeoutDiagnosis& diagnosis(int rank) { return *diagnoses_[static_cast<std::size_t>(rank)]; }

    const int size_, dead_;
    InMemoryNetwork network_;
    std::vector<std::unique_ptr<InMemoryTransport>> transports_;
    std::vector<std::unique_ptr<TimeoutDiagnosis>> diagnoses_;
};

// The largest sizes are those of 1,000 and of 12,500 hosts of 8 ranks.
CASE(a_rank_of_a_large_group_has_few_successors) {
    for (const auto& [size, successors] : {std::pair{64, 63}, {65, 7}, {8'000, 13}, {100'000, 17}}) {
        InMemoryNetwork network;
        InMemoryTransport transport(network, 0);
        std::vector<int> others(static_cast<std::size_t>(size) - 1);
        std::iota(others.begin(), others.end(), 1);
        const TimeoutDiagnosis diagnosis(transport, kTag, 0, others, [](const auto&) {});
        const auto is_successor = [&](int other) { return diagnosis.is_successor(other); };
        CHECK(std::count_if(others.begin(), others.end(), is_successor) == successors);
    }
}

constexpr int kManyRanks = 200, kSuccessors = 8;

// If all ranks wait, each forwards a remark of every other rank to its successors. It did so in a message for each
// remark: 104,000 messages among 8,000 ranks, more than the time for replies may allow. Now it sends its own remark,
// and what has come in each 10 ms.
CASE(remarks_of_many_ranks_travel_in_few_messages) {
    ManyRanks ranks(kManyRanks);
    const auto begin = Clock::now();
    ranks.name({CommError::Kind::kLost, 0, 1});  // all ranks wait in a circle, which is reported as from 0 to 1
    const auto sent = ranks.sent();
    const auto sendings = 3 + (Clock::now() - begin) / 10ms;
    for (const auto& [links, messages] : sent) {
        CHECK(links == kSuccessors);
        CHECK(messages <= sendings * kSuccessors);
    }
}

// A dead rank forwards nothing, and is named by all ranks.
CASE(a_dead_rank_does_not_keep_remarks_from_many_ranks) {
    ManyRanks ranks(kManyRanks, 123);
    ranks.name({CommError::Kind::kLost, 123});
}

}  // namespace
