#include "communicator.h"

#include <algorithm>
#include <string>

#include "mpi_state.h"
#include "poll_backoff.h"

namespace dist_prims::mpi {
namespace {

constexpr int kGuaranteedLargestTag = 32767;  // the least that MPI allows as its largest tag

int largest_tag_of_mpi() {
    int* limit = nullptr;
    int found = 0;
    check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &limit, &found), "MPI_TAG_UB");
    return found ? *limit : kGuaranteedLargestTag;
}

// Empty messages, which are cancelled when they are not needed any more.
class EmptyMessages {
public:
    void send_to(int peer, int tag) {
        check(MPI_Isend(nullptr, 0, MPI_BYTE, peer, tag, MPI_COMM_WORLD, add(peer)), "MPI_Isend");
    }
    void receive_from(int peer, int tag) {
        check(MPI_Irecv(nullptr, 0, MPI_BYTE, peer, tag, MPI_COMM_WORLD, add(peer)), "MPI_Irecv");
    }
    // Returns the ranks whose messages were not complete at the deadline.
    std::vector<int> wait(Clock::time_point deadline, const WaitHook& wait_hook) {
        PollBackoff backoff;
        try {
            while (!are_all_done()) {
                if (Clock::now() > deadline) return cancel();
                backoff.pause(wait_hook);
            }
        } catch (...) {  // Ctrl-C: a pending message would match the next roll call
            cancel();
            throw;
        }
        return {};
    }

private:
    MPI_Request* add(int peer) {
        peers_.push_back(peer);
        return &requests_.emplace_back(MPI_REQUEST_NULL);
    }
    bool are_all_done() {
        const std::lock_guard hold(mpi_lock());
        int done = 0;
        check(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, MPI_STATUSES_IGNORE),
              "MPI_Testall");
        return done;
    }
    std::vector<int> cancel() {
        const std::lock_guard hold(mpi_lock());
        std::vector<int> found;
        for (std::size_t index = 0; index < peers_.size(); ++index) {
            int done = 0;
            MPI_Test(&requests_[index], &done, MPI_STATUS_IGNORE);
            if (done) continue;
            if (std::find(found.begin(), found.end(), peers_[index]) == found.end()) found.push_back(peers_[index]);
            MPI_Cancel(&requests_[index]);
            MPI_Request_free(&requests_[index]);
        }
        return found;
    }

    std::vector<MPI_Request> requests_;
    std::vector<int> peers_;
};

// Every rank reports to the first of the ranks, which releases the others when all have reported. Returns the ranks to
// or from which a message was not complete within the timeout; the group can be made if there are none.
std::vector<int> call_roll(const std::vector<int>& ranks, int world_rank, int tag, Milliseconds timeout,
                           const WaitHook& wait_hook) {
    const auto deadline = Clock::now() + timeout;
    EmptyMessages arrivals, releases;
    {
        const std::lock_guard hold(mpi_lock());
        if (world_rank == ranks[0]) {
            for (const int peer : ranks) {
                if (peer != world_rank) arrivals.receive_from(peer, tag);
            }
        } else {
            arrivals.send_to(ranks[0], tag);
            arrivals.receive_from(ranks[0], tag);
        }
    }
    const std::vector<int> missing = arrivals.wait(deadline, wait_hook);
    if (world_rank != ranks[0] || !missing.empty()) return missing;
    {
        const std::lock_guard hold(mpi_lock());
        for (const int peer : ranks) {
            if (peer != world_rank) releases.send_to(peer, tag);
        }
    }
    return releases.wait(deadline, wait_hook);
}

// The tag under which a group is made: different groups have different tags, as far as there are enough.
int creation_tag(const std::vector<int>& ranks) {
    unsigned sum = 0x811c9dc5u;  // FNV-1a
    for (const int rank : ranks) sum = (sum ^ static_cast<unsigned>(rank)) * 0x01000193u;
    return static_cast<int>(sum % static_cast<unsigned>(kGuaranteedLargestTag));
}

std::string joined(const std::vector<int>& ranks) {
    std::string text;
    for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
    return text;
}

}  // namespace

Communicator::Communicator(const CommunicatorOptions& options, const WaitHook& wait_hook)
    : largest_count_(options.largest_count) {
    if (const std::string why = unusable(); !why.empty()) throw Transport::TransportError("no group over MPI: " + why);
    int world_rank = 0;
    {
        const std::lock_guard hold(mpi_lock());
        check(MPI_Comm_rank(MPI_COMM_WORLD, &world_rank), "MPI_Comm_rank");
    }
    const std::vector<int>& ranks = options.ranks;
    const std::string context =
        "rank " + std::to_string(world_rank) + " of MPI_COMM_WORLD, making a group of " + joined(ranks);
    const int tag = creation_tag(ranks);
    // MPI_Comm_create_group has no deadline, so the ranks first check that all of them are there.
    const std::vector<int> missing = call_roll(ranks, world_rank, tag, options.timeout, wait_hook);
    if (!missing.empty())
        throw MissingRanksError(context + ": no sign of " + joined(missing) + " within " +
                                std::to_string(options.timeout.count()) + " ms");
    const std::lock_guard hold(mpi_lock());
    MPI_Group world = MPI_GROUP_NULL, group = MPI_GROUP_NULL;
    check(MPI_Comm_group(MPI_COMM_WORLD, &world), context);
    check(MPI_Group_incl(world, static_cast<int>(ranks.size()), ranks.data(), &group), context);
    check(MPI_Comm_create_group(MPI_COMM_WORLD, group, tag, &comm_), context);
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), context);
    largest_tag_ = largest_tag_of_mpi();
    check(MPI_Allreduce(MPI_IN_PLACE, &largest_tag_, 1, MPI_INT, MPI_MIN, comm_), context);  // the same on all ranks
    MPI_Group_free(&group);
    MPI_Group_free(&world);
}

// A pending message keeps its communicator, so none is pending here.
Communicator::~Communicator() {
    const std::lock_guard hold(mpi_lock());
    if (comm_ != MPI_COMM_NULL && unusable().empty()) MPI_Comm_free(&comm_);
}

void Communicator::fail(const std::string& reason) {
    const std::lock_guard hold(guard_);
    if (!failure_) failure_ = std::make_exception_ptr(Transport::TransportError(reason));
}

std::exception_ptr Communicator::failure() const {
    const std::lock_guard hold(guard_);
    return failure_;
}

}  // namespace dist_prims::mpi
