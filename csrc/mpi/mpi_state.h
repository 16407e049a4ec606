// The MPI library that mpi4py has loaded into this process: its lock, its errors, its end.
#pragma once

#include <mpi.h>

#include <mutex>

#include "library.h"

namespace dist_prims::mpi {

using Clock = std::chrono::steady_clock;

// All calls of MPI are made under this lock. With MPI_THREAD_SERIALIZED they must be; with MPI_THREAD_MULTIPLE the
// library would take a lock of its own for each. Nothing that may need Python is done or destroyed under it.
std::mutex& mpi_lock();

std::string error_text(int code);               // MPI's own
void check(int code, const std::string& call);  // throws TransportError

// See MpiLibrary.
std::string unusable();

// From here on MPI counts as finalised.
void mark_closed();
bool is_closed();

}  // namespace dist_prims::mpi
