// The interface between the backend and an MPI library, without <mpi.h>.
//
// MPI libraries share no ABI: handles are ints in MPICH and its derivatives, and pointers in Open MPI. The sources of
// this folder are therefore compiled once for each family, into a library without torch. The backend includes this
// header only, and loads the library of the family that mpi4py has loaded.
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../common/types.h"

namespace dist_prims::mpi {

using Milliseconds = std::chrono::milliseconds;
using WaitHook = std::function<void()>;  // called at intervals by waits; may throw
using Counts = std::vector<std::size_t>;

struct Error : std::runtime_error {
    Error(const std::string& text, bool timeout = false) : std::runtime_error(text), is_timeout(timeout) {}
    const bool is_timeout;
};

// Each function starts an MPI call. All data is contiguous, the blocks of ranks in rank order.
class Calls {
public:
    static constexpr int kAnyRank = -1;

    virtual ~Calls() = default;
    virtual void all_reduce(Op op, DType dtype, const std::byte* in, std::byte* out, std::size_t count) = 0;
    virtual void reduce(Op op, DType dtype, const std::byte* in, std::byte* out, std::size_t count, int root,
                        bool is_root) = 0;
    virtual void reduce_scatter(Op op, DType dtype, const std::byte* in, std::byte* out, const Counts& counts,
                                int rank) = 0;
    virtual void broadcast(std::byte* data, std::size_t bytes, int root) = 0;
    virtual void all_gather(const std::byte* in, std::byte* out, const Counts& bytes, int rank) = 0;
    virtual void gather(const std::byte* in, std::size_t bytes, std::byte* out, const Counts& incoming, int root) = 0;
    virtual void scatter(const std::byte* in, const Counts& outgoing, std::byte* out, std::size_t bytes, int root) = 0;
    virtual void all_to_all(const std::byte* in, const Counts& outgoing, std::byte* out, const Counts& incoming) = 0;
    virtual void barrier() = 0;
    virtual void send(const std::byte* data, std::size_t bytes, int to, int tag) = 0;
    // `from` may be kAnyRank.
    virtual void receive(std::byte* data, std::size_t bytes, int from, int tag, bool may_be_shorter) = 0;
};

// One operation of a group, from its start in MPI to its end.
class Operation {
public:
    // Called once with the result (null: success); returns a callback that runs afterwards. It owns what MPI works on.
    using Done = std::function<std::function<void()>(std::exception_ptr)>;

    struct Options {
        std::string what;  // the call, in errors
        bool is_message;
        // Counts from the creation; for a message from when a thread waits for it, because a receive may be posted long
        // before its message comes.
        Milliseconds timeout;
        std::size_t largest_count;  // of bytes or elements in one MPI call; longer data is sent in several pieces
    };

    virtual ~Operation() = default;
    // Starts the operation by `start`. If `attended`, the caller waits for it at once.
    virtual void begin(const std::function<void(Calls&)>& start, bool attended) = 0;
    // Whether the operation has ended; makes progress on all of MPI.
    virtual bool test() = 0;
    // Returns true when the operation has ended, with or without an error, and false when another thread has called
    // wake(). After the limit (the largest value: the timeout) the group ends, and the operation with it.
    virtual bool wait(Milliseconds limit, const WaitHook& look) = 0;
    virtual void wake() = 0;
    virtual int source() const = 0;  // of a message
};

// Ranks of MPI_COMM_WORLD with a communicator of their own.
class Group {
public:
    virtual ~Group() = default;
    virtual int rank() const = 0;
    virtual int size() const = 0;
    virtual int largest_tag() const = 0;  // for messages; the same on all ranks
    virtual std::shared_ptr<Operation> operation(Operation::Options options, Operation::Done done) = 0;

    // Ends the group: operations in progress fail with the reason at their next poll, and nothing begins any more. Only
    // the first reason is kept.
    virtual void fail(std::exception_ptr reason) = 0;
    virtual std::exception_ptr failure() const = 0;

    // A barrier that reports absent ranks: rank 0 receives a message from every other rank, then releases them. Returns
    // the ranks that sent nothing.
    virtual std::vector<int> roll_call(Milliseconds timeout, const WaitHook& look) const = 0;
};

// The MPI library of this process.
class Library {
public:
    virtual ~Library() = default;
    // Why no operation can start: MPI is not initialised, already finalised, or does not allow threads. Empty if all is
    // well.
    virtual std::string unusable() = 0;
    // Called by all of the ranks, which are those of MPI_COMM_WORLD; throws if one does not come in time.
    virtual std::shared_ptr<Group> make_group(const std::vector<int>& ranks, Milliseconds timeout,
                                              const WaitHook& look) = 0;
    // Fails all pending operations and refuses new ones: before MPI is finalised, or before the process ends.
    virtual void close() = 0;
};

// The function that the library of each family exports under this name. The object lives as long as the process.
using GetLibrary = Library*();
constexpr const char* kGetLibrary = "dist_prims_mpi_library";

}  // namespace dist_prims::mpi
