// A group of ranks: their communicator, and the error that ended the group.
#pragma once

#include <mpi.h>

#include <mutex>

#include "library.h"

namespace dist_prims::mpi {

class MpiGroup : public Group, public std::enable_shared_from_this<MpiGroup> {
public:
    MpiGroup(const std::vector<int>& ranks, Milliseconds timeout, const WaitHook& look);
    ~MpiGroup() override;
    MpiGroup(const MpiGroup&) = delete;
    MpiGroup& operator=(const MpiGroup&) = delete;

    MPI_Comm comm() const { return comm_; }
    int rank() const override { return rank_; }
    int size() const override { return size_; }
    int largest_tag() const override { return largest_tag_; }
    std::shared_ptr<Operation> operation(Operation::Options options, Operation::Done done) override;
    void fail(std::exception_ptr reason) override;
    std::exception_ptr failure() const override;
    std::vector<int> roll_call(Milliseconds timeout, const WaitHook& look) const override;

private:
    MPI_Comm comm_ = MPI_COMM_NULL;
    int rank_ = 0, size_ = 0, largest_tag_ = 0;
    mutable std::mutex guard_;
    std::exception_ptr failure_;
};

}  // namespace dist_prims::mpi
