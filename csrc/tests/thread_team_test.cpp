// The threads of a large call, and how many of them a call has.
#include "../common/thread_team.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../common/core_share.h"
#include "../shm/collectives.h"
#include "test_support.h"

using namespace dist_prims;

namespace {

constexpr std::size_t kLarge = 8 * kLeastShare;  // enough for 8 threads

// A line of /proc/self/task/*/status of each helper of this process.
std::vector<std::string> helper_lines(const std::string& name) {
    std::vector<std::string> lines;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::ifstream file(task.path() / "status");
        bool is_helper = false;
        for (std::string line; std::getline(file, line);) {
            is_helper = is_helper || line == "Name:\tdist_prims_copy";
            if (is_helper && line.starts_with(name)) lines.push_back(line.substr(name.size() + 1));
        }
    }
    return lines;
}

std::size_t helpers() {
    return helper_lines("Name:").size();
}

// Adds 1 to each of `count` bytes on the threads of the call; returns the number of shares.
std::size_t count_up(std::vector<unsigned char>& data) {
    std::atomic<std::size_t> shares{0};
    parallel_shares(data.size(), [&](const Share& share) {
        const Range part = share.of(data.size());
        CHECK(part.begin % kCacheLine == 0 || part.empty());
        for (std::size_t at = part.begin; at < part.end; ++at) ++data[at];
        shares = share.count;
    });
    return shares;
}

bool all_are(const std::vector<unsigned char>& data, unsigned char value) {
    return std::all_of(data.begin(), data.end(), [=](unsigned char byte) { return byte == value; });
}

// The bits of an average over ranks as threads of this process, in shared tensors. One of the ranks has helpers.
std::vector<float> average_in_place(int threads) {
    constexpr int kRanks = 3;
    constexpr std::size_t kCount = 2200001, kBytes = kCount * sizeof(float);
    const auto memory = memory_for(kRanks, kSlot);
    std::vector<std::vector<float>> results(kRanks, std::vector<float>(kCount));
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
        ranks.emplace_back([&, rank] {
            HostSegment host_segment(memory, rank, kRanks, kSlot);
            auto& own = results[static_cast<std::size_t>(rank)];
            std::byte* const data = Exporter::instance().allocate(kBytes);
            for (std::size_t i = 0; i < kCount; ++i)
                reinterpret_cast<float*>(data)[i] = 1.0f / static_cast<float>(static_cast<std::size_t>(rank + 1) + i);
            Call call;
            call.collective = Collective::kAllReduce;
            call.tensor_ref = Exporter::instance().ref_of(data, kBytes);
            host_segment.slots.open(call, std::chrono::seconds(60));
            const CallThreads threads_of_rank(rank == 1 ? threads : 1);
            all_reduce(host_segment, DType::kFloat32, Op::kAvg, data, data, kCount, call.tensor_ref);
            std::memcpy(own.data(), data, kBytes);
            Exporter::instance().release(data);
        });
    }
    for (std::thread& rank : ranks) rank.join();
    CHECK(results[0] == results[1] && results[1] == results[2]);
    return results[0];
}

CASE(shares_cover_data_of_any_size_once) {
    for (int threads : {1, 3, 8}) {
        const CallThreads call(threads);
        for (std::size_t bytes :
             {std::size_t{0}, std::size_t{1}, 2 * kLeastShare - 1, 2 * kLeastShare, 3 * kLeastShare + 77, kLarge + 1}) {
            std::vector<unsigned char> data(bytes);
            const std::size_t most = bytes / kLeastShare;
            const std::size_t shares = std::min(static_cast<std::size_t>(threads), std::max<std::size_t>(most, 1));
            for (unsigned char turn = 1; turn <= 3; ++turn) {
                CHECK(count_up(data) == shares);
                CHECK(all_are(data, turn));
            }
        }
    }
    CHECK(helpers() == 7);
}

CASE(helpers_give_the_bits_of_one_thread) {
    const std::vector<float> expected = average_in_place(1);
    for (int threads : {2, 3, 7}) CHECK(average_in_place(threads) == expected);
    CHECK(helpers() == 6);
}

CASE(helpers_sleep_outside_of_a_division) {
    std::vector<unsigned char> data(kLarge);
    const auto sleep = [] {
        const auto states = helper_lines("State:");
        return std::all_of(states.begin(), states.end(), [](const auto& state) { return state[0] == 'S'; });
    };
    count_up(data);
    CHECK(helpers() == 0);  // a call without threads starts none
    const CallThreads call(4);
    CHECK(count_up(data) == 4);
    CHECK(helpers() == 3);
    wait_until(sleep);
    CHECK(count_up(data) == 4);  // they wake up again
    wait_until(sleep);
    CHECK(helpers() == 3);
}

// So a helper does not stop its caller, and keeps to the cores that the rank is pinned to after the first call.
CASE(helpers_follow_the_cores_of_the_caller) {
    cpu_set_t all, allowed;
    CHECK(::sched_getaffinity(0, sizeof all, &all) == 0);
    if (CPU_COUNT(&all) < 2) return;
    const CallThreads call(2);
    const auto both = [&] {  // runs until each thread has one share
        std::atomic<int> begun{0};
        parallel_shares(kLarge, [&](const Share&) {
            ++begun;
            wait_until([&] { return begun == 2; });
            if (::gettid() != ::getpid()) ::sched_getaffinity(0, sizeof allowed, &allowed);
        });
    };
    both();
    CHECK(CPU_COUNT(&allowed) == CPU_COUNT(&all) - 1);
    cpu_set_t two;
    CPU_ZERO(&two);
    for (std::size_t core = 0; CPU_COUNT(&two) < 2; ++core) {
        if (CPU_ISSET(core, &all)) CPU_SET(core, &two);
    }
    CHECK(::sched_setaffinity(0, sizeof two, &two) == 0);
    both();
    CPU_AND(&two, &two, &allowed);
    CHECK(CPU_COUNT(&allowed) == 1 && CPU_EQUAL(&two, &allowed));
}

CASE(a_division_within_another_is_one_share) {
    const CallThreads call(4);
    std::atomic<int> outer{0};
    parallel_shares(kLarge, [&](const Share&) {
        std::vector<unsigned char> data(kLarge);
        const CallThreads nested(4);  // the team is in use
        CHECK(count_up(data) == 1);
        CHECK(all_are(data, 1));
        ++outer;
    });
    CHECK(outer == 4);
    std::vector<unsigned char> data(kLarge);
    CHECK(count_up(data) == 4);
}

CASE(threads_that_call_at_once_divide_or_work_alone) {
    std::vector<std::thread> callers;
    std::atomic<bool> has_divided{false};
    for (int caller = 0; caller < 3; ++caller) {
        callers.emplace_back([&, caller] {
            const CallThreads call(2 + caller);
            std::vector<unsigned char> data(kLarge / 2);
            for (unsigned char turn = 1; turn <= 5; ++turn) {
                const std::size_t shares = count_up(data);
                CHECK(shares == 1 || shares == static_cast<std::size_t>(2 + caller));
                if (shares > 1) has_divided = true;
                CHECK(all_are(data, turn));
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
    CHECK(has_divided);
}

CASE(an_exception_of_a_share_reaches_the_caller) {
    const CallThreads call(4);
    for (std::size_t failing = 0; failing < 4; ++failing) {
        std::atomic<int> done{0};
        std::string text;
        try {
            parallel_shares(kLarge, [&](const Share& share) {
                if (share.number == failing) throw std::runtime_error("share " + std::to_string(failing));
                std::this_thread::sleep_for(std::chrono::milliseconds(5));
                ++done;
            });
        } catch (const std::runtime_error& error) {
            text = error.what();
        }
        CHECK(text == "share " + std::to_string(failing));
        CHECK(done == 3);
    }
    std::vector<unsigned char> data(kLarge);
    CHECK(count_up(data) == 4);
}

CASE(a_forked_child_has_a_team_of_its_own) {
    const CallThreads call(3);
    std::vector<unsigned char> data(kLarge);
    count_up(data);
    CHECK(helpers() == 2);
    const Child child([&] {  // in the middle of a call of its parent
        CHECK(helpers() == 0);
        CHECK(count_up(data) == 3);
        const CallThreads own(4);
        CHECK(count_up(data) == 4);
        CHECK(all_are(data, 3));
        CHECK(helpers() == 3);
    });
    CHECK(child.status() == 0);
    CHECK(count_up(data) == 3);
    CHECK(all_are(data, 2));
}

CASE(without_helpers_the_caller_does_all_shares) {
    pthread_attr_t too_large;  // a stack that no system has: pthread_create() fails
    CHECK(::pthread_attr_init(&too_large) == 0);
    CHECK(::pthread_attr_setstacksize(&too_large, std::size_t{1} << 50) == 0);
    CHECK(::pthread_setattr_default_np(&too_large) == 0);
    const CallThreads call(4);
    std::vector<unsigned char> data(kLarge);
    for (unsigned char turn = 1; turn <= 3; ++turn) {
        CHECK(count_up(data) == 4);
        CHECK(all_are(data, turn));
    }
    CHECK(helpers() == 0);
}

CASE(ranks_divide_the_cores_that_they_share) {
    const auto cores = [](std::size_t begin, std::size_t end) {
        Cores set;
        for (std::size_t core = begin; core < end; ++core) set.set(core);
        return set;
    };
    const auto share = [&](Cores own, const std::vector<Cores>& others, std::size_t unknown) {
        return static_cast<int>(core_share(own, others, unknown));
    };
    CHECK(share(cores(0, 48), {}, 0) == 48);
    CHECK(share(cores(0, 48), std::vector(5, cores(0, 48)), 0) == 8);
    CHECK(share(cores(0, 48), {cores(0, 48)}, 4) == 8);                // ranks outside of the group count
    CHECK(share(cores(8, 16), {cores(0, 8), cores(16, 24)}, 0) == 8);  // pinned
    CHECK(share(cores(0, 8), {cores(4, 12)}, 0) == 6);
    CHECK(share(cores(0, 3), std::vector(2, cores(0, 3)), 0) == 1);
    CHECK(share(cores(5, 6), {}, 0) == 1);
    CHECK(share(cores(0, 2), std::vector(4, cores(0, 2)), 0) == 0);
    CHECK(share({}, {}, 0) == 0);
}

CASE(a_call_has_the_threads_of_its_cores) {
    CHECK(threads_of_call(1) == 1);
    const int alone = threads_of_call(64);
    CHECK(alone >= 1 && alone <= 8);
    CHECK(describe_threads(64, 1).starts_with(std::to_string(alone) + " in a call of 2 MB or more"));
    note_ranks_of_host({static_cast<int>(::getpid()), 0, 0}, 100000);  // the call after it sees them
    CHECK(threads_of_call(64) == 1);
    const Child child([] { CHECK(describe_threads(64, 0).find("cores for 1 rank,") != std::string::npos); });
    CHECK(child.status() == 0);
    assume_cores(5);
    CHECK(threads_of_call(64) == 5);
    CHECK(threads_of_call(3) == 3);
}

}  // namespace
