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
// Memory order, for any processor. Each rank stores its own phase counter and loads the counters of the others:
// 1. The data and the call are written before the store of the counter (release). Readers load the counter of each rank
//    before they read its data and its call (acquire).
// 2. A slot is reused without a race, because a reader has read it before it stores its counter for the next phase
//    (release), and the writer loads that counter before it overwrites the slot (acquire).
// 3. All these accesses are sequentially consistent: each rank stores its counter, then loads the counters of the other
//    ranks. So of two ranks that post at once at least one sees that it is the last, and wakes the ranks that sleep
//    (membership.h). Else each could take the other to be behind, and no rank would wake them.
// 4. A rank may store to a part of another rank's slot that no other rank reads in this phase (shared_copies.h). The
//    writer's data came before that by 1., and the writer overwrites it after that by 2.
// 5. `calls` (release, acquire) orders `number` (slot_exchange.cpp) for the wait-for graph: a reader sees the number of
//    that call, or of a later one.
// Copies past the cache are ended before phase() (streaming.h). tests/csrc/test_memory_order.py explores all executions
// of 1. to 4. for two ranks, and of 3. for three.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "../common/types.h"
#include "membership.h"
#include "shared_copies.h"

namespace dist_prims {

// Throws Mismatch. Every rank calls it when the calls of two ranks differ.
// `own_name`: of this rank, with which the error begins; the others: the two ranks and their calls.
[[noreturn]] void throw_mismatch(const std::string& own_name, int first, const Call& first_call, int second,
                                 const Call& second_call);

class SlotExchange {
public:
    // The bytes of shared memory for `size` ranks, with two slots of `capacity` bytes for each.
    static std::size_t bytes(int size, std::size_t capacity) { return slots_begin(size, size, capacity); }
    // The offset of the two slots of a rank in these bytes. The slots of the next rank follow.
    static std::size_t slots_begin(int size, int rank, std::size_t capacity);

    // For tests: sets the counters in new memory, before a rank uses it.
    static void set_counters(std::byte* place, int size, std::uint64_t value);

    // `place` points to bytes(size, capacity) of the shared memory. The phases continue from the counter in it, which
    // is 0 in new memory.
    SlotExchange(std::shared_ptr<const Mapping> memory, std::byte* place, Membership& membership, std::size_t capacity);

    int rank() const { return membership_.rank(); }
    int size() const { return membership_.size(); }
    std::size_t capacity() const { return capacity_; }

    // Announces the call that this rank is about to make. The next phase() compares the announcements of all ranks and
    // throws MismatchError on every rank if two differ, unless `compares` is false: in a group that spans hosts the
    // agreement compares them. The timeout begins with a long wait.
    void open(const Call& call, std::chrono::milliseconds timeout, bool compares = true);
    // Restarts the timeout for the rest of the call.
    void restart_timeout() { deadline_ = Clock::time_point{}; }

    // This rank's slot for the data of the next phase: capacity() bytes.
    std::byte* mine() { return slot(rank(), phase_ + 1); }
    // Writes data to mine().
    SharedWriter& writer() { return writer_; }
    // Posts mine(), and waits until all ranks have posted.
    void phase();
    // The slot of a rank in the last phase. Valid until this rank's next phase.
    const std::byte* theirs(int rank) const { return slot(rank, phase_); }
    // Throws if the group has ended.
    void check_abort() const {
        membership_.check_abort([this] { return call_.text(); });
    }

    // The call that a rank has opened. Valid between the first and the second phase of a call, like all that follow.
    const Call& call(int rank) const;
    // The first rank whose call differs from that of rank 0, or -1.
    int differing_rank() const;
    // The largest Call::longest of all ranks.
    std::uint64_t longest() const;
    // The number of ranks whose data lies in shared tensors.
    int shared_tensor_count() const;

private:
    struct PhaseEntry;

    PhaseEntry& entry(int rank) const;
    std::byte* slot(int rank, std::uint64_t phase) const;
    bool is_behind(int rank) const;
    // The first rank that is behind; -1 if none is.
    int first_behind() const;
    bool any_is_behind() const { return first_behind() >= 0; }
    void wait_for_all(int first);
    void check_failures(std::optional<LongWait>& long_wait);
    std::string late_text() const;

    const std::shared_ptr<const Mapping> memory_;
    std::byte* const place_;
    Membership& membership_;
    const std::size_t capacity_;           // bytes of a slot
    std::uint64_t phase_ = 0, calls_ = 0;  // phases posted and calls opened by this rank, modulo 2^64
    SharedWriter writer_;
    Call call_;                   // that this rank has opened
    bool compares_ = false;       // whether the next phase compares the calls
    Clock::time_point deadline_;  // zero: the timeout has not begun
    std::chrono::milliseconds timeout_{0};
};

}  // namespace dist_prims
