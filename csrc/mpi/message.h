// A message in MPI, from its start to its end.
//
// MPI counts in ints: longer data is one element of a longer type. (Open MPI 5 lacks the large-count functions of
// MPI 4.)
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <utility>

#include "communicator.h"

namespace dist_prims::mpi {

class MpiMessage : public std::enable_shared_from_this<MpiMessage> {
public:
    // `owner` keeps the memory: MPI may read the memory of a send even after release().
    MpiMessage(std::shared_ptr<Communicator> communicator, Transport::Owner owner)
        : communicator_(std::move(communicator)), owner_(std::move(owner)) {}

    void send(int to, int tag, const std::byte* data, std::size_t bytes);
    // `from` may be Transport::kAnyone. The message may be shorter than `bytes` if `may_be_shorter`.
    void receive(int from, int tag, std::byte* data, std::size_t bytes, bool may_be_shorter);

    // Whether the message is over, with or without an error. Makes progress on all of MPI. After close() a
    // pending message is never over, because the release of its owner could destroy tensors while Python ends. Only
    // wait() fails then.
    bool test();
    // Takes the message from MPI, which is about to end. Only Progress::close() calls it.
    void abandon();
    // As TransportRequest::wait().
    bool wait(Milliseconds limit);
    void abort() { is_aborted_ = true; }
    int source() const { return source_; }
    bool is_awaited() const { return waits_ > 0; }
    // The caller no longer needs the message. Its memory may go then, unless it has an owner.
    void release();

private:
    template <typename Start>
    void start_request(std::size_t bytes, const Start& start);
    bool test_request();
    void finish_receive(const MPI_Status& status);
    void cancel_or_keep();

    const std::shared_ptr<Communicator> communicator_;
    const Transport::Owner owner_;
    std::size_t bytes_ = 0;
    bool is_receive_ = false, may_be_shorter_ = false;
    MPI_Request request_ = MPI_REQUEST_NULL;
    std::exception_ptr error_;  // why it has failed
    std::atomic<bool> is_over_{false}, is_aborted_{false};
    std::atomic<int> waits_{0}, source_{Transport::kAnyone};
};

}  // namespace dist_prims::mpi
