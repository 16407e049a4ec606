// The pending MPI operations of the process, and the thread that polls those that no thread waits for.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "../common/thread.h"
#include "operation.h"

namespace dist_prims::mpi {

// Lists all pending operations of the process, and polls those that no thread waits for, on a thread that sleeps while
// there are none.
class Progress {
public:
    static Progress& instance();

    void add(const std::shared_ptr<MpiOperation>& operation);
    void remove(const MpiOperation* operation);
    // Called when there is an operation that no thread waits for.
    void wake();
    // Fails all pending operations and refuses new ones: before MPI is finalised, or before the process ends.
    void close();
    // Keeps, for the life of the process, an operation that failed while MPI continues to use its lists and memory.
    void keep(std::shared_ptr<MpiOperation> operation, MpiOperation::Done memory);

    Progress();

private:
    void run();

    const int owner_;   // the process
    std::mutex guard_;  // of all below
    std::condition_variable awaken_;
    std::map<const MpiOperation*, std::shared_ptr<MpiOperation>> each_;
    std::vector<std::pair<std::shared_ptr<MpiOperation>, MpiOperation::Done>> kept_;
    Clock::time_point event_ = Clock::now();
    bool asleep_ = false, closing_ = false;
    Thread thread_;
};

}  // namespace dist_prims::mpi
