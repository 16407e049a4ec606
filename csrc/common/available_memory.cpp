#include "available_memory.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

namespace dist_prims {
namespace {

// The names of files and fields in one version of control groups (cgroups).
struct CgroupVersion {
    const char *root, *limit, *usage, *inactive_file, *active_file;
};

constexpr CgroupVersion kCgroup1{"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                 "total_inactive_file", "total_active_file"};
constexpr CgroupVersion kCgroup2{"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file", "active_file"};

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

// The least bytes that a control group and the groups that contain it have left. In a container the path may be valid
// only outside; the root is then the group of the container.
std::size_t available_in(const CgroupVersion& version, std::string path) {
    std::size_t least = SIZE_MAX;
    for (;; path.erase(path.rfind('/'))) {
        const std::string folder = version.root + path + "/";
        const std::size_t limit = number_in(folder + version.limit, SIZE_MAX);
        if (limit != SIZE_MAX) {
            const std::size_t used = number_in(folder + version.usage, 0);
            auto numbers = numbers_in(folder + "memory.stat");
            const std::size_t files = std::min(used, numbers[version.inactive_file] + numbers[version.active_file]);
            least = std::min(least, limit - std::min(limit, used - files));
        }
        if (path.empty()) return least;
    }
}

}  // namespace

std::size_t available_memory() {
    const auto machine = numbers_in("/proc/meminfo");
    const auto available = machine.find("MemAvailable:");
    std::size_t least = available == machine.end() ? SIZE_MAX : available->second * 1024;
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {  // "4:memory:/path", or "0::/path" of the second version
        const std::size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos || second + 1 == line.size()) continue;
        const std::string controllers = std::string(",").append(line, first + 1, second - first - 1).append(",");
        std::string path = line.substr(second + 1);
        if (path.back() == '/') path.pop_back();
        if (controllers == ",,") least = std::min(least, available_in(kCgroup2, path));
        if (controllers.find(",memory,") != std::string::npos) least = std::min(least, available_in(kCgroup1, path));
    }
    return least;
}

}  // namespace dist_prims
