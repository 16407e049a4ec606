// What is under way in the process, and the thread that moves on what nobody waits for.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "operation.h"

namespace dist_prims::mpi {

// Knows all operations that are under way in the process, and tests those that nobody waits for, on a thread that
// sleeps while there are none.
class Progress {
public:
    static Progress& instance();

    void add(const std::shared_ptr<Operation>& operation);
    void remove(const Operation* operation);
    // There is an operation that nobody waits for.
    void wake();
    // What is under way fails, and nothing begins any more: before MPI is finalised, or the process ends.
    void close();
    // Of what failed while MPI may still write to it: kept for the life of the process.
    void keep(Operation::Done memory, std::shared_ptr<Group> group);

    Progress();

private:
    void run();

    const int owner_;   // the process
    std::mutex guard_;  // of all below
    std::condition_variable awaken_;
    std::map<const Operation*, std::shared_ptr<Operation>> each_;
    std::vector<std::pair<Operation::Done, std::shared_ptr<Group>>> kept_;
    Clock::time_point event_ = Clock::now();
    bool asleep_ = false, closing_ = false;
    std::thread thread_;
};

}  // namespace dist_prims::mpi
