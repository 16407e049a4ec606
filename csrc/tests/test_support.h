// What the C++ tests share: named cases, checks, and ranks as threads. main.cpp runs the cases.
#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../net/schedule_executor.h"
#include "../shm/host_segment.h"

namespace dist_prims {

struct Case {
    const char* name;
    void (*run)();
};

inline std::vector<Case>& cases() {
    static std::vector<Case> all;
    return all;
}

struct RegisteredCase {
    RegisteredCase(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

}  // namespace dist_prims

// Defines a case. tests/csrc/test_core_cpp.py finds its name in the source. A case starts in a process without other
// threads.
#define CASE(name)                                                          \
    void name##_case();                                                     \
    const dist_prims::RegisteredCase name##_registered(#name, name##_case); \
    void name##_case()

#define CHECK(holds)                                                                   \
    if (!(holds)) {                                                                    \
        std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #holds); \
        std::abort();                                                                  \
    }

namespace dist_prims {

constexpr std::size_t kSlot = 1 << 12;  // small, so that much data is several segments

// Of this process.
inline std::size_t open_descriptors() {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

// 0 under a sanitizer, which keeps freed memory.
inline std::size_t resident_bytes() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return 0;
#endif
    std::ifstream file("/proc/self/statm");
    std::size_t pages = 0;
    file >> pages >> pages;
    return pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

inline std::string text_of(const std::exception_ptr& error) {
    try {
        if (error) std::rethrow_exception(error);
    } catch (const std::exception& found) {
        return found.what();
    }
    return "";
}

inline void check_contains(const std::string& text, const std::string& part) {
    if (text.find(part) != std::string::npos) return;
    std::fprintf(stderr, "\"%s\" does not contain \"%s\"\n", text.c_str(), part.c_str());
    std::abort();
}

// Returns when the condition holds; fails after a minute.
template <typename Condition>
void wait_until(const Condition& condition) {
    for (const auto until = Clock::now() + std::chrono::seconds(60); !condition();
         std::this_thread::sleep_for(std::chrono::milliseconds(1)))
        CHECK(Clock::now() < until);
}

// A process of a test. It ends with the one that made it: a case that fails leaves none.
class Child {
public:
    explicit Child(const std::function<void()>& body) : pid_(::fork()) {
        CHECK(pid_ >= 0);
        if (pid_ > 0) return;
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        body();
        ::_exit(0);
    }

    void send(int signal) const { ::kill(pid_, signal); }

    // The status with which it ends.
    int status() const {
        int status = 0;
        for (const auto until = Clock::now() + std::chrono::seconds(60); ::waitpid(pid_, &status, WNOHANG) == 0;) {
            if (Clock::now() > until) {
                ::kill(pid_, SIGKILL);
                CHECK(!"a process of the test hangs");
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        return status;
    }

private:
    const pid_t pid_;
};

// Whether `work` throws a CommError of this kind, whose text contains `text`.
template <typename Work>
bool fails(CommError::Kind kind, const Work& work, const std::string& text = "") {
    try {
        work();
    } catch (const CommError& error) {
        return error.kind == kind && std::string(error.what()).find(text) != std::string::npos;
    }
    return false;
}

inline Descriptor reserved_memory(std::size_t bytes) {
    Descriptor memory = make_sparse_memory("dist_prims", bytes);
    reserve(memory, 0, bytes);
    return memory;
}

inline std::shared_ptr<const Mapping> memory_for(int size, std::size_t slot = kSlot,
                                                 const HostSegment::Counters& counters = {}) {
    const Descriptor file = HostSegment::make_memory(size, slot);
    for (int rank = 1; rank < size; ++rank) HostSegment::reserve_pages(file, rank, size, slot);
    auto memory = std::make_shared<const Mapping>(file);
    HostSegment::set_counters(*memory, size, slot, counters);
    return memory;
}

// Runs `body(host_segment)` on one thread for each rank of a host.
template <typename Body>
void run_ranks(int size, const HostSegment::Counters& counters, const Body& body, std::size_t slot = kSlot) {
    const auto memory = memory_for(size, slot, counters);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
        threads.emplace_back([&, rank] {
            HostSegment host_segment(memory, rank, size, slot);
            body(host_segment);
        });
    }
    for (std::thread& thread : threads) thread.join();
}
template <typename Body>
void run_ranks(int size, const Body& body) {
    run_ranks(size, {}, body);
}

// A ring over all ranks: reduce_scatter, then all_gather.
inline RankProgram ring(int size, int rank) {
    RankProgram program{size, 0, {}, size};
    const auto at = [size](int number) { return ((number % size) + size) % size; };
    for (int step = 0; step < 2 * (size - 1); ++step) {
        const bool reduces = step < size - 1;
        const int sent = at(rank - step), got = at(rank - 1 - step);
        RankProgram::Step& now = program.steps.emplace_back();
        now.sends.push_back({at(rank + 1), {sent}, {sent}});
        now.receives.push_back({at(rank - 1), {got}, {got}});
        const std::vector<int> terms = reduces ? std::vector{1, step + 1} : std::vector{size};
        now.writes.push_back({got, got, !reduces, {{at(rank - 1), 0}}, terms});
    }
    return program;
}

}  // namespace dist_prims
