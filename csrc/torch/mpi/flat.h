// A list of tensors as contiguous memory, which MPI needs for the blocks of ranks.
#pragma once

#include "../common/tensor_arguments.h"

namespace dist_prims::mpi {

// The tensors' own memory if they are adjacent in it; otherwise a staging buffer.
class Flat {
public:
    explicit Flat(Tensors tensors);

    std::byte* data() const { return data_; }
    Counts counts() const { return elements(tensors_); }
    Counts bytes() const { return lengths(tensors_); }

    // For an input: copies the tensors into the staging buffer. Makes one if the tensors' memory overlaps that of
    // `output`, unless it begins at `in_place`, where MPI accepts both as one.
    void fill(const Flat& output, const std::byte* in_place = nullptr);
    // For an output: copies the staging buffer to the tensors.
    void deliver() const { copy(true); }

private:
    void take_memory();
    void copy(bool to_tensors) const;

    Tensors tensors_;
    std::size_t size_ = 0;  // in bytes
    at::Tensor memory_;     // the staging buffer, if there is one
    std::byte* data_ = nullptr;
};

}  // namespace dist_prims::mpi
