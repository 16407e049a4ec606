#include "calls.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "mpi_state.h"
#include "types.h"

namespace dist_prims::mpi {
namespace {

std::size_t sum(const Counts& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

// MPI_IN_PLACE where the input is already in the output, as MPI requires.
const void* in_place_if_same(const std::byte* in, const std::byte* out) {
    return in == out ? MPI_IN_PLACE : in;
}

}  // namespace

MPI_Request* MpiCalls::next() {
    return &requests_.emplace_back(MPI_REQUEST_NULL);
}

void MpiCalls::begun(int code) {
    if (code != MPI_SUCCESS) raise(code);
}

void MpiCalls::raise(int code) const {
    throw Error("MPI says: " + words(code));
}

MPI_Datatype MpiCalls::unit_of(std::size_t bytes) {
    MPI_Datatype made = MPI_BYTE;
    if (bytes == 1) return made;
    if (bytes <= largest_) {
        begun(MPI_Type_contiguous(static_cast<int>(bytes), MPI_BYTE, &made));
    } else {  // as many long pieces as there are, and the rest
        const int pieces = static_cast<int>(bytes / largest_);
        MPI_Datatype piece = MPI_DATATYPE_NULL, head = MPI_DATATYPE_NULL;
        begun(MPI_Type_contiguous(static_cast<int>(largest_), MPI_BYTE, &piece));
        begun(MPI_Type_contiguous(pieces, piece, &head));
        const int counts[] = {1, static_cast<int>(bytes % largest_)};
        const MPI_Aint places[] = {0, static_cast<MPI_Aint>(bytes - bytes % largest_)};
        const MPI_Datatype types[] = {head, MPI_BYTE};
        begun(MPI_Type_create_struct(2, counts, places, types, &made));
        begun(MPI_Type_free(&piece));
        begun(MPI_Type_free(&head));
    }
    begun(MPI_Type_commit(&made));
    types_.push_back(made);
    return made;
}

const MpiCalls::Layout& MpiCalls::layout(const Counts& bytes) {
    const std::size_t total = sum(bytes);
    std::size_t unit = 1;
    if (total > largest_) unit = std::accumulate(bytes.begin(), bytes.end(), std::size_t{0}, std::gcd<size_t, size_t>);
    if (total / unit > largest_)
        throw Error("blocks of " + std::to_string(total) +
                    " bytes in all, whose lengths have no common divisor above " + std::to_string(unit) +
                    ", are more than MPI can count; give blocks of equal lengths");
    Layout& made = layouts_.emplace_back();
    made.unit = unit_of(unit);
    std::size_t place = 0;
    for (const std::size_t length : bytes) {
        made.counts.push_back(static_cast<int>(length / unit));
        made.places.push_back(static_cast<int>(place / unit));
        place += length;
    }
    return made;
}

void MpiCalls::all_reduce(Op op, DType dtype, const std::byte* in, std::byte* out, std::size_t count) {
    const auto [type, operation] = reduction(op, dtype);
    std::size_t done = 0;
    do {  // also once for no data: all ranks must take part
        const std::size_t now = std::min(count - done, largest_), at = done * size_of(dtype);
        begun(MPI_Iallreduce(in == out ? MPI_IN_PLACE : in + at, out + at, static_cast<int>(now), type, operation,
                             comm_, next()));
        done += now;
    } while (done < count);
}

void MpiCalls::reduce(Op op, DType dtype, const std::byte* in, std::byte* out, std::size_t count, int root,
                      bool is_root) {
    const auto [type, operation] = reduction(op, dtype);
    std::size_t done = 0;
    do {
        const std::size_t now = std::min(count - done, largest_), at = done * size_of(dtype);
        const void* from = is_root && in == out ? MPI_IN_PLACE : static_cast<const void*>(in + at);
        begun(MPI_Ireduce(from, is_root ? out + at : nullptr, static_cast<int>(now), type, operation, root, comm_,
                          next()));
        done += now;
    } while (done < count);
}

void MpiCalls::reduce_scatter(Op op, DType dtype, const std::byte* in, std::byte* out, const Counts& counts, int rank) {
    if (sum(counts) > largest_) {  // block by block: the displacements of one call would not fit an int
        for (int root = 0; root < size_; ++root) {
            const std::size_t count = counts[static_cast<std::size_t>(root)];
            reduce(op, dtype, in, out, count, root, root == rank);
            in += count * size_of(dtype);
        }
        return;
    }
    const auto [type, operation] = reduction(op, dtype);
    Layout& made = layouts_.emplace_back();
    made.counts.assign(counts.begin(), counts.end());
    begun(MPI_Ireduce_scatter(in, out, made.counts.data(), type, operation, comm_, next()));
}

void MpiCalls::broadcast(std::byte* data, std::size_t bytes, int root) {
    const Layout& whole = layout({bytes});
    begun(MPI_Ibcast(data, whole.counts[0], whole.unit, root, comm_, next()));
}

void MpiCalls::all_gather(const std::byte* in, std::byte* out, const Counts& bytes, int rank) {
    const Layout& own = layout({bytes[static_cast<std::size_t>(rank)]});
    const Layout& all = layout(bytes);
    const std::byte* place = out + std::accumulate(bytes.begin(), bytes.begin() + rank, std::size_t{0});
    begun(MPI_Iallgatherv(in_place_if_same(in, place), own.counts[0], own.unit, out, all.counts.data(),
                          all.places.data(), all.unit, comm_, next()));
}

void MpiCalls::gather(const std::byte* in, std::size_t bytes, std::byte* out, const Counts& incoming, int root) {
    const Layout& own = layout({bytes});
    const Layout& all = layout(incoming);
    begun(MPI_Igatherv(in, own.counts[0], own.unit, out, all.counts.data(), all.places.data(), all.unit, root, comm_,
                       next()));
}

void MpiCalls::scatter(const std::byte* in, const Counts& outgoing, std::byte* out, std::size_t bytes, int root) {
    const Layout& own = layout({bytes});
    const Layout& all = layout(outgoing);
    begun(MPI_Iscatterv(in, all.counts.data(), all.places.data(), all.unit, out, own.counts[0], own.unit, root, comm_,
                        next()));
}

void MpiCalls::all_to_all(const std::byte* in, const Counts& outgoing, std::byte* out, const Counts& incoming) {
    const Layout& sent = layout(outgoing);
    const Layout& received = layout(incoming);
    begun(MPI_Ialltoallv(in, sent.counts.data(), sent.places.data(), sent.unit, out, received.counts.data(),
                         received.places.data(), received.unit, comm_, next()));
}

void MpiCalls::barrier() {
    begun(MPI_Ibarrier(comm_, next()));
}

void MpiCalls::send(const std::byte* data, std::size_t bytes, int to, int tag) {
    const Layout& whole = layout({bytes});
    begun(MPI_Isend(data, whole.counts[0], whole.unit, to, tag, comm_, next()));
}

void MpiCalls::receive(std::byte* data, std::size_t bytes, int from, int tag, bool may_be_shorter) {
    const Layout& whole = layout({bytes});
    receives_ = true;
    expected_ = bytes;
    may_be_shorter_ = may_be_shorter;
    begun(MPI_Irecv(data, whole.counts[0], whole.unit, from == kAnyRank ? MPI_ANY_SOURCE : from, tag, comm_, next()));
}

bool MpiCalls::test() {
    int done = 0;
    statuses_.resize(requests_.size());
    const int code = MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, statuses_.data());
    if (code == MPI_ERR_IN_STATUS) {
        for (const MPI_Status& each : statuses_) {
            if (each.MPI_ERROR != MPI_SUCCESS && each.MPI_ERROR != MPI_ERR_PENDING) raise(each.MPI_ERROR);
        }
    }
    if (code != MPI_SUCCESS) raise(code);
    if (!done) return false;
    release_types();
    if (!receives_) return true;
    source_ = statuses_[0].MPI_SOURCE;
    MPI_Count came = 0;
    begun(MPI_Get_elements_x(&statuses_[0], MPI_BYTE, &came));
    if (static_cast<std::size_t>(came) != expected_ && !may_be_shorter_)
        throw Error("rank " + std::to_string(source_) + " sent a message of " + std::to_string(came) + " bytes, and " +
                    std::to_string(expected_) + " are expected");
    return true;
}

bool MpiCalls::give_up() {
    bool free = true;
    for (MPI_Request& each : requests_) {
        if (each == MPI_REQUEST_NULL) continue;
        int done = 0;
        if (receives_ && MPI_Cancel(&each) == MPI_SUCCESS) MPI_Test(&each, &done, MPI_STATUS_IGNORE);
        free = free && done;
    }
    return free;
}

void MpiCalls::release_types() {
    for (MPI_Datatype& each : types_) MPI_Type_free(&each);
    types_.clear();
}

}  // namespace dist_prims::mpi
