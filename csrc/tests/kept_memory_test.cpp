// Memory that the process keeps between collectives: used again, bounded, never used twice at once.
#include "../common/kept_memory.h"

#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "test_support.h"

using namespace dist_prims;

namespace {

constexpr std::size_t kMegabyte = 1 << 20;

CASE(kept_memory_is_used_again) {
    std::byte* before = nullptr;
    {
        const KeptMemory memory = KeptMemory::take(kMegabyte);
        before = memory.data();
        CHECK(memory.bytes() == kMegabyte && KeptMemory::kept() == 0);
    }
    CHECK(KeptMemory::kept() == kMegabyte);
    const KeptMemory larger = KeptMemory::take(2 * kMegabyte), much_smaller = KeptMemory::take(kMegabyte / 4);
    CHECK(larger.data() != before && much_smaller.data() != before);
    const KeptMemory smaller = KeptMemory::take(kMegabyte * 3 / 4);
    CHECK(smaller.data() == before && smaller.bytes() == kMegabyte && KeptMemory::kept() == 0);
}

CASE(kept_memory_is_bounded) {
    {
        const KeptMemory small = KeptMemory::take(KeptMemory::kLeast - 1),
                         large = KeptMemory::take(KeptMemory::kMost + 1);
    }
    CHECK(KeptMemory::kept() == 0);
    const std::size_t third = KeptMemory::kMost / 3;
    std::vector<KeptMemory> taken;
    std::vector<std::byte*> addresses;
    for (int each = 0; each < 4; ++each) {
        taken.push_back(KeptMemory::take(third));
        addresses.push_back(taken.back().data());
    }
    for (KeptMemory& each : taken) const KeptMemory returned = std::move(each);  // in this order
    CHECK(KeptMemory::kept() == 3 * third);                                      // the first has been released
    for (int each = 3; each > 0; --each) {
        taken.push_back(KeptMemory::take(third));
        CHECK(taken.back().data() == addresses[static_cast<std::size_t>(each)]);
    }
}

CASE(kept_memory_has_one_user_at_a_time) {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
        threads.emplace_back([thread] {
            std::mt19937 random(static_cast<unsigned>(thread));
            for (int turn = 0; turn < 300; ++turn) {
                const KeptMemory memory = KeptMemory::take(KeptMemory::kLeast * (1 + random() % 4));
                std::memset(memory.data(), thread, memory.bytes());
                std::this_thread::yield();
                for (std::size_t at = 0; at < memory.bytes(); at += 1021) CHECK(memory.data()[at] == std::byte(thread));
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}

// The lock may be held when another thread forks: the child would wait for it without end. So it did if the fork came
// while the first call made the pool. A lock in the allocator of the thread sanitizer still does that.
CASE(kept_memory_in_a_forked_child) {
#if defined(__SANITIZE_THREAD__)
    return;
#endif
    std::atomic<bool> is_over{false};
    std::thread user([&] {
        while (!is_over) const KeptMemory memory = KeptMemory::take(KeptMemory::kLeast);
    });
    for (int turn = 0; turn < 100; ++turn) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(30);
            {
                const KeptMemory memory = KeptMemory::take(KeptMemory::kLeast);
            }
            _exit(0);
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(status == 0);
    }
    is_over = true;
    user.join();
}

}  // namespace
