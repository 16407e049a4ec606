// Tensor memory that the other ranks of a host may map, so that a collective works on it where it lies.
//
// Who allocates here lends: a call says which memory its data lies in and where (a Loan), and a peer that meets the
// memory for the first time opens it through /proc and maps it. That is no collective: ranks allocate when they like.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "memory.h"
#include "types.h"

namespace dist_prims {

// The memory that this process lends.
class Lender {
public:
    static Lender& instance();

    std::byte* allocate(std::size_t bytes);
    void release(std::byte* data);

    // The loan of these bytes; none if they lie in ordinary memory.
    Loan loan(const std::byte* data, std::size_t bytes);

private:
    struct Memory {
        Descriptor descriptor;
        Mapping mapping;
        std::uint64_t inode;
    };

    const int owner_ = this_process();
    std::mutex mutex_;
    std::map<const std::byte*, Memory> lent_;  // by where the data begins
};

// The memory of others that this rank has mapped.
class Borrower {
public:
    // Where a loan of a process lies here; null if it cannot be had.
    std::byte* at(int process, const Loan& loan);

private:
    std::map<std::uint64_t, Mapping> borrowed_;  // by inode
};

}  // namespace dist_prims
