// The identity of a process, and a descriptor that reports its end.
//
// A pid does not serve as identity: it has no meaning in another PID namespace, and the kernel reuses it. So no rank
// opens a pid that another rank has sent. Each rank opens a pidfd of itself (an exit descriptor) and sends the
// descriptor to the others. The groups of a process share the exit descriptors, one for each watched process. All
// functions may be called from any thread.
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

// The pid of this process, cached. Objects remember the pid of the process that has made them, so that they do nothing
// in a forked child, which has another pid.
int this_process();

// Fills memory with random bytes of the kernel.
void fill_random(void* data, std::size_t bytes);

// The identity of this process; a forked child has another one.
ProcessId this_process_id();

// A new descriptor that poll() reports as soon as this process has ended: a pidfd. If the kernel refuses it (before
// Linux 5.3, or by a seccomp filter), it is the read end of a pipe. Only this process holds the write end open: its
// forked children close their copies, and exec() closes them as well. A child made by a bare clone() that never calls
// exec() would hide the death of this process.
Descriptor make_exit_descriptor();

// The PID namespace of this process as a number; 0 where /proc is not mounted.
std::uint64_t pid_namespace();

// The exit descriptor of another process.
using ExitDescriptor = std::shared_ptr<const Descriptor>;

struct KnownProcess {
    ProcessId id;
    ExitDescriptor exit;
    int pid;  // 0 if the descriptor is not a pidfd, or the process runs in another PID namespace
};

// The processes whose exit descriptors are in use in this process. A forked child knows none.
std::vector<KnownProcess> known_processes();

// The exit descriptor of a process, if one is in use; null otherwise.
ExitDescriptor find_exit_descriptor(const ProcessId& id);

// The exit descriptor of a process that is in use. If there is none, `received` is in use from now on, for all groups.
ExitDescriptor share_exit_descriptor(const ProcessId& id, Descriptor received);

}  // namespace dist_prims
