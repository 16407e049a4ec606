// The interface between the backend and an MPI library, without <mpi.h>.
//
// MPI libraries share no ABI: handles are ints in MPICH and its derivatives, and pointers in Open MPI. The sources of
// this folder are therefore compiled once for each family, into a library without torch. The backend includes this
// header only, and loads the library of the family that mpi4py has loaded.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../net/transport.h"

namespace dist_prims::mpi {

using Milliseconds = std::chrono::milliseconds;
using WaitHook = std::function<void()>;  // called at intervals by waits; may throw

// For a new group: its ranks, by their ranks in MPI_COMM_WORLD, and limits.
struct CommunicatorOptions {
    std::vector<int> ranks;
    Milliseconds timeout;       // until all ranks have come
    std::size_t largest_count;  // of bytes in one MPI call, which counts in ints
};

struct MissingRanksError : Transport::TransportError {
    using TransportError::TransportError;
};

// The MPI library of this process.
class MpiLibrary {
public:
    virtual ~MpiLibrary() = default;
    // Why no message can start: MPI is not initialised, already finalised, or does not allow threads. Empty if all is
    // well.
    virtual std::string unusable() = 0;
    // Called by all of the ranks; throws MissingRanksError if one does not come in time, and TransportError if MPI
    // fails.
    virtual std::unique_ptr<Transport> make_transport(const CommunicatorOptions& options,
                                                      const WaitHook& wait_hook) = 0;
    // Fails the waits for pending messages, and refuses new messages: before MPI is finalised, or the process ends.
    virtual void close() = 0;
};

// The function that the library of each family exports under this name. The object lives as long as the process.
using GetLibrary = MpiLibrary*();
constexpr const char* kGetLibrary = "dist_prims_mpi_library";

}  // namespace dist_prims::mpi
