// Runs the cases of the C++ tests: all of them, or those named as arguments. --list prints their names. Those of UCX
// are left out where ucx_test.cpp does not know a UCX.
//
// Each case runs in a child process: a failure does not hide the cases after it, and each of them may fork. A case that
// is named alone runs in the process itself, for a debugger.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <string_view>

#include "test_support.h"

using namespace dist_prims;

namespace {

bool passes(const Case& each) {
    const pid_t child = ::fork();
    if (child == 0) {
        each.run();
        std::exit(0);  // where the sanitizers report leaks
    }
    int status = 0;
    return ::waitpid(child, &status, 0) == child && status == 0;
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
    for (const Case& each : chosen) {
        std::fflush(nullptr);
        if (passes(each)) continue;
        std::fprintf(stderr, "%s fails\n", each.name);
        ++failures;
    }
    return failures ? 1 : 0;
}
