// The MPI library that mpi4py has loaded into this process: its lock, its errors, its end.
#pragma once

#include <mpi.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>

namespace dist_prims::mpi {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;
using WaitHook = std::function<void()>;  // called at intervals by waits; may throw

struct Error : std::runtime_error {
    Error(const std::string& text, bool timeout = false) : std::runtime_error(text), is_timeout(timeout) {}
    const bool is_timeout;
};

// All calls of MPI are made under this lock. With MPI_THREAD_SERIALIZED they must be; with MPI_THREAD_MULTIPLE the
// library would take a lock of its own for each. Nothing that may need Python is done or destroyed under it.
std::mutex& lock();

std::string words(int code);                           // MPI's own
void check(int code, const std::string& who_in_what);  // throws Error

// Why no operation can start: MPI is not initialised, already finalised, or does not allow threads. Empty if all is
// well.
std::string unusable();

// From here on MPI counts as finalised.
void mark_closed();
bool closed();

}  // namespace dist_prims::mpi
