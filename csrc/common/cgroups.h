// The control groups (cgroups, v1 and v2) of this process.
#pragma once

#include <string>
#include <vector>

namespace dist_prims {

struct Cgroup {
    bool is_v2;
    std::string folder;  // with its files; ends with a slash
};

// The groups that limit a resource ("memory", "cpu") of this process: its own, and the groups that contain it. In a
// container a path may be valid only outside; the root is then the group of the container.
std::vector<Cgroup> cgroups(const std::string& controller);

}  // namespace dist_prims
