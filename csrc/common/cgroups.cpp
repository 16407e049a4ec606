#include "cgroups.h"

#include <fstream>

namespace dist_prims {

std::vector<Cgroup> cgroups(const std::string& controller) {
    std::vector<Cgroup> groups;
    std::ifstream file("/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {  // "4:memory:/path", or "0::/path" of the second version
        const std::size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos || second + 1 == line.size()) continue;
        const std::string controllers = std::string(",").append(line, first + 1, second - first - 1).append(",");
        const bool is_v2 = controllers == ",,";
        if (!is_v2 && controllers.find("," + controller + ",") == std::string::npos) continue;
        std::string path = line.substr(second + 1);
        if (path.back() == '/') path.pop_back();
        for (;; path.erase(path.rfind('/'))) {
            groups.push_back({is_v2, (is_v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/" + controller) + path + "/"});
            if (path.empty()) break;
        }
    }
    return groups;
}

}  // namespace dist_prims
