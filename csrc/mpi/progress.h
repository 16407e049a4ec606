// The pending messages of the process in MPI, and the thread that polls the messages that no thread waits for. It
// sleeps while there are none.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <vector>

#include "../common/thread.h"
#include "message.h"
#include "mpi_state.h"

namespace dist_prims::mpi {

class Progress {
public:
    static Progress& instance();

    void add(const std::shared_ptr<MpiMessage>& message);
    void remove(const MpiMessage* message);
    // Called when there is a message that no thread waits for.
    void wake();
    // See MpiLibrary.
    void close();
    // Keeps, for the life of the process, a message that was given up while MPI continues to use its memory.
    void keep(std::shared_ptr<MpiMessage> message);

    Progress();

private:
    void run();

    const int owner_;   // the process
    std::mutex guard_;  // of all below
    std::condition_variable changed_;
    std::map<const MpiMessage*, std::shared_ptr<MpiMessage>> pending_;
    std::vector<std::shared_ptr<MpiMessage>> kept_;
    Clock::time_point last_event_ = Clock::now();
    bool is_asleep_ = false, is_closing_ = false;
    Thread thread_;
};

}  // namespace dist_prims::mpi
