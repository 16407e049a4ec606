// Tensor memory that the other ranks of a host may map, so that a collective works on it where it lies.
//
// Who allocates here lends: a call says which memory its data lies in and where (a Loan), and a peer that meets the
// memory for the first time opens it through /proc and maps it. That is no collective: ranks allocate when they like.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "memory.h"
#include "types.h"

namespace dist_prims {

// What stands in front of lent data, for those who have mapped it.
struct LentHead {
    static constexpr std::size_t kStamps = 511;  // with the rest, a page

    std::atomic<std::uint64_t> released;         // whether the memory is still in use
    std::atomic<std::uint64_t> stamps[kStamps];  // see gradual.h
};

// `data`: the beginning of lent data, wherever it is mapped.
LentHead& head_of(std::byte* data);

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
    // The memory of a loan of a process, mapped here; null if it cannot be had.
    std::shared_ptr<const Mapping> memory(int process, const Loan& loan);

    // Whether all ranks are known to have it. They learn that together, and open what is new to them together: so they
    // always say the same of memory that is in use.
    bool is_agreed(const Loan& loan) const;
    void agree(const Loan& loan);

private:
    struct Borrowed {
        std::shared_ptr<const Mapping> mapping;
        bool is_agreed = false;
    };

    std::map<std::uint64_t, Borrowed> borrowed_;  // by inode
};

}  // namespace dist_prims
