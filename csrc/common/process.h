// The identity of a process, and a descriptor that reports its end.
//
// A pid does not serve as identity: it has no meaning in another PID namespace, and the kernel reuses it. So no rank
// opens a pid that another rank has sent. Each rank opens a pidfd of itself and passes the descriptor on.
//
// Groups of a process share these descriptors: each watched process costs one, for any number of groups.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <memory>
#include <vector>

#include "shared_memory.h"

namespace dist_prims {

// 128 random bits.
struct ProcessId {
    std::array<std::uint64_t, 2> bits{};
    auto operator<=>(const ProcessId&) const = default;
};

// The pid of this process, cached. A forked child has another one: an object that remembers the pid of its process does
// nothing in a forked child.
int this_process();

// Random bytes of the kernel, as ProcessId and others need them.
void fill_random(void* data, std::size_t bytes);

// The identity of this process; a forked child has another one.
ProcessId this_process_id();

// A new descriptor that poll() reports as soon as this process has ended: a pidfd. Where the kernel has none (before
// Linux 5.3, or a seccomp filter) it is the end of a pipe whose other end this process alone holds open: its forked
// children close that, and exec closes it as well. Only a child made by a bare clone() that never calls exec would keep
// a death hidden.
Descriptor make_exit_descriptor();

// The PID namespace of this process as a number; 0 where /proc is not mounted.
std::uint64_t pid_namespace();

// The exit descriptor of another process.
using ExitDescriptor = std::shared_ptr<const Descriptor>;

struct KnownProcess {
    ProcessId id;
    ExitDescriptor exit;
};

// The processes whose exit descriptors are in use in this process. A forked child knows none.
std::vector<KnownProcess> known_processes();

// The exit descriptor of a process, if it is in use; null otherwise.
ExitDescriptor find_exit_descriptor(const ProcessId& id);

// The one that is in use, or else `received`, for all groups from now on.
ExitDescriptor share_exit_descriptor(const ProcessId& id, Descriptor received);

}  // namespace dist_prims
