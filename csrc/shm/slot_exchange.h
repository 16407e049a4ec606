// The exchange of data between the ranks of one host: two slots of shared memory for each rank, and a phase counter
// that is the only synchronisation.
//
// Every collective is a sequence of phases, the same number on every rank. Before a phase a rank writes its data into
// mine(). phase() posts the data and returns when all ranks have posted. Then the rank reads the data of the others in
// theirs(rank).
//
//     rank 0   write mine()  phase()  read theirs(1)   write mine()  phase()  ...
//     rank 1   write mine()  phase()  read theirs(0)   write mine()  phase()  ...
//
// Each rank uses its two slots in turn (double buffering), so one wait for each phase suffices. Proof: a reader may
// read the data of phase t until it posts phase t + 1. The writer reuses that slot for phase t + 2, and only after it
// has returned from phase t + 1. At that point all readers have posted t + 1, so they have finished reading the data of
// t.
//
// Posting is a store to an atomic counter, and waiting is a load of it. Only its owner writes the counter, which has a
// cache line of its own. Nothing else is synchronised, on x86 or on Arm. The accesses are sequentially consistent and
// not only release and acquire, because they must be ordered with the sleeper counts (see membership.h): the last rank
// to post must see which ranks sleep.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "../common/types.h"
#include "membership.h"

namespace dist_prims {

// Throws Mismatch; called on all ranks when the calls of two ranks differ.
[[noreturn]] void throw_mismatch(int rank, int one, const Call& calls, int other, const Call& differs);

class SlotExchange {
public:
    // The bytes of shared memory for `size` ranks, with two slots of `capacity` bytes for each.
    static std::size_t bytes(int size, std::size_t capacity);

    // For tests: lets the counters of new memory begin at `value`. To be called before a rank uses the memory.
    static void set_counters(std::byte* place, int size, std::uint64_t value);

    // `place` points to bytes(size, capacity) of the shared memory. The phases continue from the counter in it, which
    // is 0 in new memory.
    SlotExchange(std::shared_ptr<const Mapping> memory, std::byte* place, Membership& membership, std::size_t capacity);

    int rank() const { return membership_.rank(); }
    int size() const { return membership_.size(); }
    std::size_t capacity() const { return capacity_; }

    // Announces the call that this rank is about to make. The next phase() compares the announcements of all ranks and
    // throws Mismatch on every rank if two differ, unless `compares` is false.
    void open(const Call& call, std::chrono::milliseconds timeout, bool compares = true);
    // Restarts the timeout for the rest of the call.
    void restart_timeout() { deadline_ = Clock::time_point{}; }
    // The first rank whose call differs from rank 0's, or -1. Valid after the first phase.
    int differing_rank() const;

    std::byte* mine();
    void phase();
    // Throws if the group has ended.
    void check_abort() const;
    const std::byte* theirs(int rank) const;

    // The call that a rank has opened. Valid after the first phase of a call, as are longest() and
    // shared_tensor_count().
    const Call& call(int rank) const;
    // The largest Call::longest of all ranks.
    std::uint64_t longest() const;
    // The number of ranks whose data lies in shared tensors.
    int shared_tensor_count() const;

private:
    struct PhaseEntry;

    PhaseEntry& entry(int rank) const;
    std::byte* slot(int rank, std::uint64_t phase) const;
    bool is_behind(int rank) const;
    bool any_is_behind() const;
    void wait_for_all();
    void check_failures(std::optional<LongWait>& long_wait);
    std::string late_text() const;

    const std::shared_ptr<const Mapping> memory_;
    std::byte* const place_;
    Membership& membership_;
    const std::size_t capacity_;
    std::uint64_t phase_ = 0, calls_ = 0;
    Call call_;
    bool compares_ = false;
    Clock::time_point deadline_;
    std::chrono::milliseconds timeout_{0};
};

}  // namespace dist_prims
