// The log in shared memory: threads as ranks, a full log, and a process that is killed while it appends.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <stdexcept>

#include "test_support.h"

using namespace dist_prims;

namespace {

std::shared_ptr<const Mapping> log_memory(int size) {
    return std::make_shared<Mapping>(reserved_memory(SharedLog::bytes(size)));
}

}  // namespace

CASE(log_orders_the_texts_of_all_ranks) {
    constexpr int kRanks = 4, kTexts = 12;
    const auto memory = log_memory(kRanks);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
        ranks.emplace_back([&, rank] {
            SharedLog log(memory, memory->data(), rank, kRanks);
            for (int each = 0; each < kTexts; ++each) log.append(std::string(static_cast<std::size_t>(each), 'x'));
        });
    }
    for (std::thread& each : ranks) each.join();
    std::map<int, std::size_t> next;
    const auto texts = SharedLog(memory, memory->data(), 0, kRanks).read();
    CHECK(texts.size() == kRanks * kTexts);
    for (const auto& [rank, text] : texts) CHECK(text.size() == next[rank]++);  // those of one rank in its order
}

CASE(log_that_is_full) {
    const auto memory = log_memory(1);
    SharedLog log(memory, memory->data(), 0, 1);
    std::exception_ptr error;
    std::size_t appended = 0;
    for (; !(error = caught([&] { log.append(std::string(100, 'x')); })); ++appended) {
    }
    check_contains(text_of(error), "rank 0");
    CHECK(log.read().size() == appended);
    const auto other = log_memory(1);
    SharedLog entries(other, other->data(), 0, 1);
    for (appended = 0; !caught([&] { entries.append(""); }); ++appended) {
    }
    CHECK(entries.read().size() == appended);
}

// The child appends until it is killed, at most so often that the texts of the parent have their entries: without that
// end a fast child once filled the log, and the parent's append failed.
CASE(log_after_a_death) {
    constexpr int kTexts = 40, kTextsOfChild = 64;
    for (int round = 0; round < 20; ++round) {
        const Descriptor file = reserved_memory(SharedLog::bytes(2));
        const Child child([&] {  // the mapping of the parent is not inherited
            const auto own = std::make_shared<Mapping>(file);
            SharedLog log(own, own->data(), 1, 2);
            for (int each = 0; each < kTextsOfChild; ++each) log.append("child");
            ::pause();
        });
        const auto own = std::make_shared<Mapping>(file);
        SharedLog log(own, own->data(), 0, 2);
        for (int each = 0; each < kTexts; ++each) {
            log.append("parent");
            if (each == round) child.send(SIGKILL);
        }
        CHECK(WTERMSIG(child.status()) == SIGKILL);
        int of_parent = 0, of_child = 0;
        for (const auto& [rank, text] : log.read()) {
            CHECK(text == (rank == 0 ? "parent" : "child"));
            ++(rank == 0 ? of_parent : of_child);
        }
        CHECK(of_parent == kTexts && of_child <= kTextsOfChild);
    }
}
