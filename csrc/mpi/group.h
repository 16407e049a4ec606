// Ranks of MPI_COMM_WORLD with a communicator of their own.
#pragma once

#include <mpi.h>

#include <exception>
#include <vector>

#include "mpi_state.h"

namespace dist_prims::mpi {

class Group {
public:
    // Made by all of the ranks, which are those of MPI_COMM_WORLD; throws if one does not come in time.
    Group(const std::vector<int>& ranks, Milliseconds timeout, const WaitHook& look);
    ~Group();
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;

    MPI_Comm comm() const { return comm_; }
    int rank() const { return rank_; }
    int size() const { return size_; }
    int largest_tag() const { return largest_tag_; }  // for messages; the same on all ranks

    // Ends the group: operations in progress fail with the reason at their next poll, and nothing begins any more. Only
    // the first reason is kept.
    void fail(std::exception_ptr reason);
    std::exception_ptr failure() const;

    // A barrier that reports absent ranks: rank 0 receives a message from every other rank, then releases them. Returns
    // the ranks that sent nothing.
    std::vector<int> roll_call(Milliseconds timeout, const WaitHook& look) const;

private:
    MPI_Comm comm_ = MPI_COMM_NULL;
    int rank_ = 0, size_ = 0, largest_tag_ = 0;
    mutable std::mutex guard_;
    std::exception_ptr failure_;
};

}  // namespace dist_prims::mpi
