#include "available_memory.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "cgroups.h"

namespace dist_prims {
namespace {

// The names of files and fields in one version of control groups (cgroups).
struct CgroupFiles {
    const char *limit, *usage, *inactive_file, *active_file;
};

constexpr CgroupFiles kCgroup1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
                               "total_active_file"};
constexpr CgroupFiles kCgroup2{"memory.max", "memory.current", "inactive_file", "active_file"};

// The number in a file; `otherwise` if there is no such file, or it contains a word ("max").
std::size_t number_in(const std::string& path, std::size_t otherwise) {
    std::size_t value = 0;
    return std::ifstream(path) >> value ? value : otherwise;
}

// The numbers of a file of lines like "name 123" or "name: 123 kB".
std::map<std::string, std::size_t> numbers_in(const std::string& path) {
    std::map<std::string, std::size_t> numbers;
    std::ifstream file(path);
    for (std::string line, name; std::getline(file, line);) {
        std::size_t value = 0;
        if (std::istringstream(line) >> name >> value) numbers[name] = value;
    }
    return numbers;
}

// The bytes that a control group has left.
std::size_t available_in(const Cgroup& group) {
    const CgroupFiles& files = group.is_v2 ? kCgroup2 : kCgroup1;
    const std::size_t limit = number_in(group.folder + files.limit, SIZE_MAX);
    if (limit == SIZE_MAX) return SIZE_MAX;
    const std::size_t used = number_in(group.folder + files.usage, 0);
    auto numbers = numbers_in(group.folder + "memory.stat");
    const std::size_t cached = std::min(used, numbers[files.inactive_file] + numbers[files.active_file]);
    return limit - std::min(limit, used - cached);
}

}  // namespace

std::size_t available_memory() {
    const auto machine = numbers_in("/proc/meminfo");
    const auto available = machine.find("MemAvailable:");
    std::size_t least = available == machine.end() ? SIZE_MAX : available->second * 1024;
    for (const Cgroup& group : cgroups("memory")) least = std::min(least, available_in(group));
    return least;
}

}  // namespace dist_prims
