// Ranks of MPI_COMM_WORLD with a communicator of their own.
#pragma once

#include <mpi.h>

#include <exception>
#include <vector>

#include "library.h"

namespace dist_prims::mpi {

class Group {
public:
    // Made by all of the ranks, which are those of MPI_COMM_WORLD; throws if one has not come in time.
    Group(const std::vector<int>& ranks, Milliseconds timeout, const LookAround& look);
    ~Group();
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;

    MPI_Comm comm() const { return comm_; }
    int rank() const { return rank_; }
    int size() const { return size_; }
    int largest_tag() const { return largest_tag_; }

    // The group ends: what is under way fails with the reason as soon as someone looks, and nothing begins any more.
    // The first reason stays.
    void fail(std::exception_ptr reason);
    std::exception_ptr failure() const;

    // Rank 0 hears from all the others, and then lets them go. Returns of whom there was no sign.
    std::vector<int> roll_call(Milliseconds timeout, const LookAround& look) const;

private:
    MPI_Comm comm_ = MPI_COMM_NULL;
    int rank_ = 0, size_ = 0, largest_tag_ = 0;
    mutable std::mutex guard_;
    std::exception_ptr failure_;
};

}  // namespace dist_prims::mpi
