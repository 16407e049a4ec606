// The pending MPI calls of one operation: their requests, and the lists that MPI reads until they are done.
//
// MPI counts in ints. Longer data is cut into several reductions, or moved as fewer elements of a longer type: the unit
// is the greatest common divisor of the lengths, so blocks of equal length always fit. (Open MPI 5 lacks the
// large-count functions of MPI 4.)
#pragma once

#include <mpi.h>

#include <cstddef>
#include <deque>
#include <vector>

#include "library.h"

namespace dist_prims::mpi {

class MpiCalls : public Calls {
public:
    MpiCalls(MPI_Comm comm, int size, std::size_t largest_count) : comm_(comm), size_(size), largest_(largest_count) {}

    void all_reduce(Op op, DType dtype, const std::byte* in, std::byte* out, std::size_t count) override;
    void reduce(Op op, DType dtype, const std::byte* in, std::byte* out, std::size_t count, int root,
                bool is_root) override;
    void reduce_scatter(Op op, DType dtype, const std::byte* in, std::byte* out, const Counts& counts,
                        int rank) override;
    void broadcast(std::byte* data, std::size_t bytes, int root) override;
    void all_gather(const std::byte* in, std::byte* out, const Counts& bytes, int rank) override;
    void gather(const std::byte* in, std::size_t bytes, std::byte* out, const Counts& incoming, int root) override;
    void scatter(const std::byte* in, const Counts& outgoing, std::byte* out, std::size_t bytes, int root) override;
    void all_to_all(const std::byte* in, const Counts& outgoing, std::byte* out, const Counts& incoming) override;
    void barrier() override;
    void send(const std::byte* data, std::size_t bytes, int to, int tag) override;
    void receive(std::byte* data, std::size_t bytes, int from, int tag, bool may_be_shorter) override;

    // Whether all calls are done; throws their error. Makes progress on all of MPI.
    bool test();
    int source() const { return source_; }  // of a message
    // Cancels the calls. Returns false if MPI continues to use the memory: only receives can be cancelled.
    bool give_up();

private:
    // Lengths in units of an MPI type.
    struct Layout {
        MPI_Datatype unit = MPI_BYTE;
        std::vector<int> counts, places;
    };
    const Layout& layout(const Counts& bytes);
    MPI_Datatype unit_of(std::size_t bytes);
    MPI_Request* next();
    void begun(int code);
    void raise(int code) const;
    void release_types();

    const MPI_Comm comm_;
    const int size_;
    const std::size_t largest_;
    std::vector<MPI_Request> requests_;
    std::vector<MPI_Status> statuses_;
    std::deque<Layout> layouts_;  // MPI reads them until the end
    std::vector<MPI_Datatype> types_;
    bool receives_ = false;
    std::size_t expected_ = 0;  // bytes of a message
    bool may_be_shorter_ = false;
    int source_ = MPI_ANY_SOURCE;
};

}  // namespace dist_prims::mpi
