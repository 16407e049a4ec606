// Tensors of a list in one piece of memory, as MPI wants the blocks of ranks.
#pragma once

#include "../../backend/tensors.h"

namespace dist_prims::mpi {

// The tensors' own memory, where they lie one after the other in it, else some to copy from or to.
class Flat {
public:
    explicit Flat(Tensors tensors);

    std::byte* data() const { return data_; }
    Counts counts() const { return elements(tensors_); }
    Counts bytes() const { return lengths(tensors_); }

    // For an input: take what the tensors hold; into memory of its own if theirs is that of `output`, too, unless it
    // begins `in_place`, where MPI takes both as one.
    void fill(const Flat& output, const std::byte* in_place = nullptr);
    // For an output: give it to the tensors.
    void deliver() const { copy(true); }

private:
    void take_memory();
    void copy(bool to_tensors) const;

    Tensors tensors_;
    std::size_t size_ = 0;  // in bytes
    at::Tensor memory_;     // if it is not theirs
    std::byte* data_ = nullptr;
};

// A tensor in blocks: of equal sizes, or of so many rows as `splits` says.
Tensors blocks(const char* what, const at::Tensor& tensor, int size, const std::vector<int64_t>& splits = {});

}  // namespace dist_prims::mpi
