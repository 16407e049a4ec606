// The messages of a group through MPI, between ranks of any hosts.
//
// MPI moves data only while a thread polls it: the thread that waits for a message polls, and a thread of the process
// polls the messages that no thread waits for (see progress.h). A receive cannot be posted in shared memory as well,
// because a message that MPI has matched cannot be given back; so MPI carries all messages of users in such a group.
#pragma once

#include "../net/tags.h"
#include "communicator.h"

namespace dist_prims::mpi {

class MpiTransport : public Transport {
public:
    explicit MpiTransport(std::shared_ptr<Communicator> communicator);

    int largest_tag() const override { return communicator_->largest_tag(); }
    bool has_claims() const override { return false; }
    Handle send(int to, int tag, const std::byte* data, std::size_t bytes, Owner owner) override;
    Handle receive(int from, int tag, std::byte* data, std::size_t bytes, Owner owner) override;

private:
    const std::shared_ptr<Communicator> communicator_;
    const Tags tags_;
};

}  // namespace dist_prims::mpi
