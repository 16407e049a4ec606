#include "message.h"

#include "mpi_state.h"
#include "poll_backoff.h"
#include "progress.h"

namespace dist_prims::mpi {
namespace {

// Counts a waiting thread. Progress does not poll a message while a thread waits for it.
class WaitCount {
public:
    explicit WaitCount(std::atomic<int>& waits) : waits_(waits) { ++waits_; }
    ~WaitCount() { --waits_; }
    WaitCount(const WaitCount&) = delete;
    WaitCount& operator=(const WaitCount&) = delete;

private:
    std::atomic<int>& waits_;
};

// A type of this many bytes: as many pieces of `largest` bytes as fit, and the rest.
MPI_Datatype make_long_type(std::size_t bytes, std::size_t largest) {
    const int pieces = static_cast<int>(bytes / largest);
    MPI_Datatype piece = MPI_DATATYPE_NULL, head = MPI_DATATYPE_NULL, made = MPI_DATATYPE_NULL;
    check(MPI_Type_contiguous(static_cast<int>(largest), MPI_BYTE, &piece), "MPI_Type_contiguous");
    check(MPI_Type_contiguous(pieces, piece, &head), "MPI_Type_contiguous");
    const int counts[] = {1, static_cast<int>(bytes % largest)};
    const MPI_Aint places[] = {0, static_cast<MPI_Aint>(bytes - bytes % largest)};
    const MPI_Datatype types[] = {head, MPI_BYTE};
    check(MPI_Type_create_struct(2, counts, places, types, &made), "MPI_Type_create_struct");
    check(MPI_Type_free(&piece), "MPI_Type_free");
    check(MPI_Type_free(&head), "MPI_Type_free");
    check(MPI_Type_commit(&made), "MPI_Type_commit");
    return made;
}

}  // namespace

template <typename Start>
void MpiMessage::start_request(std::size_t bytes, const Start& start) {
    bytes_ = bytes;
    {
        const std::lock_guard guard(mpi_lock());
        if (const std::string why = unusable(); !why.empty()) throw Transport::TransportError(why);
        if (const auto failure = communicator_->failure()) std::rethrow_exception(failure);
        if (bytes > communicator_->largest_count()) {
            MPI_Datatype type = make_long_type(bytes, communicator_->largest_count());
            start(1, type);
            check(MPI_Type_free(&type), "MPI_Type_free");  // MPI keeps it until the message is over
        } else {
            start(static_cast<int>(bytes), MPI_BYTE);
        }
    }
    if (test()) return;
    Progress::instance().add(shared_from_this());
    Progress::instance().wake();
}

void MpiMessage::send(int to, int tag, const std::byte* data, std::size_t bytes) {
    start_request(bytes, [&](int count, MPI_Datatype type) {
        check(MPI_Isend(data, count, type, to, tag, communicator_->comm(), &request_), "MPI_Isend");
    });
}

void MpiMessage::receive(int from, int tag, std::byte* data, std::size_t bytes, bool may_be_shorter) {
    is_receive_ = true;
    may_be_shorter_ = may_be_shorter;
    const int source = from == Transport::kAnyone ? MPI_ANY_SOURCE : from;
    start_request(bytes, [&](int count, MPI_Datatype type) {
        check(MPI_Irecv(data, count, type, source, tag, communicator_->comm(), &request_), "MPI_Irecv");
    });
}

bool MpiMessage::test() {
    {
        const std::lock_guard guard(mpi_lock());
        if (is_over_) return true;
        if (is_closed() || !test_request()) return false;  // after close() no message becomes over: see message.h
        is_over_ = true;
    }
    Progress::instance().remove(this);
    return true;
}

// is_over_ remains false, so that a wait() throws.
void MpiMessage::abandon() {
    const std::lock_guard guard(mpi_lock());
    if (!is_over_) cancel_or_keep();
}

// Called under the lock.
bool MpiMessage::test_request() {
    try {
        int is_done = 0;
        MPI_Status status;
        const int code = MPI_Test(&request_, &is_done, &status);
        int kind = code;
        if (code != MPI_SUCCESS) MPI_Error_class(code, &kind);
        if (kind == MPI_ERR_TRUNCATE)
            throw Transport::LengthError("a message of more than the " + std::to_string(bytes_) +
                                         " bytes that are expected has come");
        check(code, "MPI_Test");
        if (is_done) {
            if (is_receive_) finish_receive(status);
            return true;
        }
        error_ = communicator_->failure();
    } catch (const Transport::TransportError&) {
        error_ = std::current_exception();
    }
    if (error_) cancel_or_keep();
    return error_ != nullptr;
}

void MpiMessage::finish_receive(const MPI_Status& status) {
    source_ = status.MPI_SOURCE;
    MPI_Count received_bytes = 0;
    check(MPI_Get_elements_x(&status, MPI_BYTE, &received_bytes), "MPI_Get_elements_x");
    if (static_cast<std::size_t>(received_bytes) != bytes_ && !may_be_shorter_)
        throw Transport::LengthError("rank " + std::to_string(source_) + " sent a message of " +
                                     std::to_string(received_bytes) + " bytes, and " + std::to_string(bytes_) +
                                     " are expected");
}

// Called under the lock. Only a receive can be cancelled: MPI continues to read the memory of a send.
void MpiMessage::cancel_or_keep() {
    if (request_ == MPI_REQUEST_NULL) return;
    int is_done = 0, is_finalized = 0;
    MPI_Finalized(&is_finalized);
    if (!is_finalized && is_receive_ && MPI_Cancel(&request_) == MPI_SUCCESS)
        MPI_Test(&request_, &is_done, MPI_STATUS_IGNORE);
    if (!is_done) Progress::instance().keep(shared_from_this());
}

bool MpiMessage::wait(Milliseconds limit) {
    const auto until = Clock::now() + limit;
    PollBackoff backoff;
    const WaitCount counted(waits_);
    while (!test()) {
        if (is_closed())
            throw Transport::TransportError("the process is about to end, or MPI to be finalised, before this is done");
        if (is_aborted_.exchange(false)) return false;
        if (Clock::now() >= until) communicator_->fail("the time limit of a message has passed");  // test() finds it
        backoff.pause({});
    }
    if (error_) std::rethrow_exception(error_);
    return true;
}

void MpiMessage::release() {
    {
        const std::lock_guard guard(mpi_lock());
        if (is_over_) return;
        is_over_ = true;
        cancel_or_keep();
    }
    Progress::instance().remove(this);
}

}  // namespace dist_prims::mpi
