// Shares of a reduction on several threads, and how many threads a rank has.
#include "../common/shares.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../common/core_share.h"
#include "../common/thread.h"
#include "../shm/in_place.h"
#include "test_support.h"

using namespace dist_prims;

namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t kFloats = (24 << 20) / 4 + 5;  // floats: more than two threads' worth for each of two ranks

cpu_set_t cores_of(const std::vector<std::size_t>& numbers) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    for (const std::size_t number : numbers) CPU_SET(number, &cores);
    return cores;
}

// The cores of this process.
std::vector<std::size_t> own_cores() {
    cpu_set_t cores;
    CHECK(::sched_getaffinity(0, sizeof cores, &cores) == 0);
    std::vector<std::size_t> numbers;
    for (std::size_t core = 0; core < CPU_SETSIZE; ++core) {
        if (CPU_ISSET(core, &cores)) numbers.push_back(core);
    }
    return numbers;
}

void pin(int pid, const std::vector<std::size_t>& numbers) {
    const cpu_set_t cores = cores_of(numbers);
    CHECK(::sched_setaffinity(pid, sizeof cores, &cores) == 0);
}

bool has_helper() {
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string name;
        if (std::getline(std::ifstream(task.path() / "comm"), name) && name == "dist_prims_fold") return true;
    }
    return false;
}

// The tensors of two ranks after both have reduced their shares. Part of the input of rank 0 is deferred.
std::vector<Bytes> averages() {
    std::vector<Bytes> tensors(2, Bytes(kFloats * 4));
    std::vector<float> deferred(kFloats / 4, 0.1f);
    for (std::size_t rank = 0; rank < 2; ++rank) {
        for (std::size_t at = 0; at < kFloats; ++at)
            reinterpret_cast<float*>(tensors[rank].data())[at] = 1.0f / static_cast<float>(at + rank + 1);
    }
    const Places places{tensors[0].data(), tensors[1].data()};
    DeferredInput pieces;
    pieces.add({{4096, 4096 + deferred.size() * 4}, reinterpret_cast<const std::byte*>(deferred.data()), 0.3});
    InPlace(0, DType::kFloat32, Op::kAvg, places).fold_share(kFloats * 4, pieces);
    InPlace(1, DType::kFloat32, Op::kAvg, places).fold_share(kFloats * 4, {});
    return tensors;
}

CASE(each_share_is_done_once) {
    for (const std::size_t threads : {1, 2, 7}) {
        for (const std::size_t shares : {1, 2, 7, 40}) {
            std::vector<int> done(shares);
            do_shares(threads, shares, [&](std::size_t share) { ++done[share]; });
            CHECK(done == std::vector<int>(shares, 1));
        }
    }
}

CASE(shares_are_done_at_the_same_time) {
    std::atomic<int> begun{0};
    do_shares(3, 3, [&](std::size_t) {
        ++begun;
        wait_until([&] { return begun == 3; });
    });
}

CASE(an_exception_of_a_share_reaches_the_caller) {
    for (std::size_t failing = 0; failing < 3; ++failing) {
        std::atomic<int> done{0};
        const std::string error = text_of(caught([&] {
            do_shares(3, 3, [&](std::size_t share) {
                if (share == failing) throw std::runtime_error("share " + std::to_string(share));
                std::this_thread::sleep_for(std::chrono::milliseconds(5));
                ++done;
            });
        }));
        CHECK(error == "share " + std::to_string(failing));
        CHECK(done == 2);  // the caller has waited for the others
    }
}

CASE(without_helpers_the_caller_does_all_shares) {
    pthread_attr_t too_large;  // a stack that no system has: pthread_create() fails
    CHECK(::pthread_attr_init(&too_large) == 0);
    CHECK(::pthread_attr_setstacksize(&too_large, std::size_t{1} << 50) == 0);
    CHECK(::pthread_setattr_default_np(&too_large) == 0);
    std::vector<std::thread::id> threads(4);
    do_shares(4, 4, [&](std::size_t share) { threads[share] = std::this_thread::get_id(); });
    CHECK(threads == std::vector(4, std::this_thread::get_id()));
}

CASE(threads_give_the_bits_of_one_thread) {
    const std::vector<Bytes> expected = averages();
    CHECK(expected[0] == expected[1]);
    if (own_cores().size() < 2) return;
    set_program_threads([] { return 8; });
    std::atomic<bool> is_seen{false}, is_over{false};
    std::thread observer([&] {
        while (!is_over) is_seen = is_seen || has_helper();
    });
    wait_until([&] {
        CHECK(averages() == expected);
        return is_seen.load();
    });
    is_over = true;
    observer.join();
}

CASE(a_small_share_does_not_ask_for_threads) {
    static std::atomic<int> questions{0};
    set_program_threads([] { return ++questions; });
    Bytes tensors[2] = {Bytes(4 << 20), Bytes(4 << 20)};
    const Places places{tensors[0].data(), tensors[1].data()};
    InPlace in_place(0, DType::kUInt8, Op::kSum, places);
    in_place.fold_share(4 << 20, {});
    CHECK(questions == 0);
    const BackgroundScope background;
    CHECK(threads_of_rank() == 1 && questions == 0);
}

CASE(ranks_divide_the_cores_that_they_share) {
    const auto cores = [](std::size_t begin, std::size_t end) {
        std::vector<std::size_t> numbers;
        for (std::size_t core = begin; core < end; ++core) numbers.push_back(core);
        return cores_of(numbers);
    };
    const auto share = [](const cpu_set_t& own, const std::vector<cpu_set_t>& others) {
        return static_cast<int>(core_share(own, others));
    };
    CHECK(share(cores(0, 48), {}) == 48);
    CHECK(share(cores(0, 48), std::vector(5, cores(0, 48))) == 8);
    CHECK(share(cores(8, 16), {cores(0, 8), cores(16, 24)}) == 8);  // pinned
    CHECK(share(cores(0, 8), {cores(4, 12)}) == 6);
    CHECK(share(cores(0, 3), std::vector(2, cores(0, 3))) == 1);  // three thirds
    CHECK(share(cores(0, 2), std::vector(3, cores(0, 2))) == 0);
}

CASE(a_rank_has_the_threads_of_its_cores) {
    CHECK(threads_of_rank() == 1);  // the program has not said how many
    const std::vector<std::size_t> cores = own_cores();
    const int all = static_cast<int>(std::min<std::size_t>(cores.size(), 8));
    static std::atomic<int> wanted{64};
    set_program_threads([] { return wanted.load(); });
    CHECK(threads_of_rank() == static_cast<std::size_t>(all));
    wanted = 1;
    CHECK(threads_of_rank() == 1);
    wanted = 64;
    if (all < 2) return;
    const int other = ::fork();
    CHECK(other >= 0);
    if (other == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;) ::pause();
    }
    const ExitDescriptor exit =
        share_exit_descriptor({{1, 2}}, Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, other, 0))));
    pin(0, {cores[0], cores[1]});
    pin(other, {cores[0], cores[1]});
    CHECK(threads_of_rank() == 1);
    if (cores.size() > 2) {
        pin(other, {cores[2]});
        CHECK(threads_of_rank() == 2);
    }
    pin(0, {cores[1]});
    pin(other, {cores[0]});
    CHECK(threads_of_rank() == 1);
    pin(0, {cores[0], cores[1]});
    CHECK(threads_of_rank() == 1);  // one and a half
    ::kill(other, SIGKILL);
    CHECK(::waitpid(other, nullptr, 0) == other);
    CHECK(threads_of_rank() == 2);  // it has ended
    const ExitDescriptor pipe = share_exit_descriptor({{3, 4}}, Descriptor(::open("/dev/null", O_RDONLY)));
    CHECK(threads_of_rank() == 1);  // the cores of this rank are not known
}

}  // namespace
