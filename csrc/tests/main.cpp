// Runs the cases of the C++ tests: all of them, or those named as arguments. --list prints their names. Those of UCX
// are left out where ucx_test.cpp does not know a UCX.
//
// Each case runs in a child process, four at a time because most of them wait: a failure does not hide the cases after
// it, and each of them may fork. A case that is named alone runs in the process itself, for a debugger.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <string_view>

#include "test_support.h"

using namespace dist_prims;

namespace {

constexpr std::size_t kAtOnce = 4;

pid_t start(const Case& each) {
    std::fflush(nullptr);
    const pid_t child = ::fork();
    if (child == 0) {
        each.run();
        std::exit(0);  // where the sanitizers report leaks
    }
    CHECK(child > 0);
    return child;
}

// Waits for a case to end, and returns whether it has failed.
bool next_fails(std::map<pid_t, const char*>& running) {
    int status = 0;
    const pid_t child = ::wait(&status);
    CHECK(running.contains(child));
    if (status) std::fprintf(stderr, "%s fails\n", running[child]);
    running.erase(child);
    return status != 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (!std::getenv("DIST_PRIMS_TEST_UCX"))
        std::erase_if(cases(), [](const Case& each) { return std::string_view(each.name).starts_with("ucx_"); });
    std::vector<Case> chosen = cases();
    if (argc == 2 && std::string_view(argv[1]) == "--list") {
        for (const Case& each : chosen) std::printf("%s\n", each.name);
        return 0;
    }
    if (argc > 1) chosen.clear();
    for (int number = 1; number < argc; ++number) {
        const auto found = std::find_if(cases().begin(), cases().end(),
                                        [&](const Case& each) { return std::string_view(each.name) == argv[number]; });
        if (found == cases().end()) {
            std::fprintf(stderr, "no case is named %s; --list prints the names\n", argv[number]);
            return 2;
        }
        chosen.push_back(*found);
    }
    if (chosen.size() == 1) {
        chosen[0].run();
        return 0;
    }
    int failures = 0;
    std::map<pid_t, const char*> running;
    for (const Case& each : chosen) {
        if (running.size() == kAtOnce) failures += next_fails(running);
        running[start(each)] = each.name;
    }
    while (!running.empty()) failures += next_fails(running);
    return failures ? 1 : 0;
}
