// The communicator of a group, and the error that ended the group.
#pragma once

#include <mpi.h>

#include <exception>
#include <mutex>

#include "library.h"

namespace dist_prims::mpi {

class Communicator {
public:
    Communicator(const CommunicatorOptions& options, const WaitHook& wait_hook);
    ~Communicator();
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;

    MPI_Comm comm() const { return comm_; }
    int largest_tag() const { return largest_tag_; }  // the same on all ranks
    std::size_t largest_count() const { return largest_count_; }
    // Ends the group: messages under way fail with the reason at their next poll, and nothing begins any more. Only the
    // first reason is kept.
    void fail(const std::string& reason);
    std::exception_ptr failure() const;

private:
    const std::size_t largest_count_;
    MPI_Comm comm_ = MPI_COMM_NULL;
    int largest_tag_ = 0;
    mutable std::mutex guard_;
    std::exception_ptr failure_;
};

}  // namespace dist_prims::mpi
