// A notice board for the ranks of one host: the one thing that they share, and the one way in which they wait.
//
// Every collective is a sequence of phases, as many on every rank. Before a phase a rank writes what it has to say into
// mine(); phase() posts it and returns when all ranks have posted; then it reads what the others said in theirs(rank).
//
//     rank 0   write mine()  phase()  read theirs(1)   write mine()  phase()  ...
//     rank 1   write mine()  phase()  read theirs(0)   write mine()  phase()  ...
//
// Each rank has two slots and uses them in turn, and that is why no second wait is needed. What was posted in phase t
// may be read until its reader posts phase t + 1. A slot is written again for phase t + 2, by one who has returned from
// phase t + 1: so all readers have posted t + 1, and have done with t.
//
// The post is a store, the wait a load, of an atomic counter that only its owner writes, on a cache line of its own.
// That is all the synchronisation there is, on x86 and on Arm alike. (They are in one order with those of the sleepers,
// see peers.h, and not release and acquire only: the last one to post must see who sleeps.)
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "peers.h"
#include "types.h"

namespace dist_prims {

// Raised by all ranks where the calls of two differ.
[[noreturn]] void disagree(int rank, int one, const Call& calls, int other, const Call& differs);

class Board {
public:
    // How many bytes of memory a board for `size` ranks takes with two slots of `capacity` bytes for each.
    static std::size_t bytes(int size, std::size_t capacity);

    // `place`: bytes(size, capacity) of the shared memory.
    Board(std::shared_ptr<const Mapping> memory, std::byte* place, Peers& peers, std::size_t capacity);

    int rank() const { return peers_.rank(); }
    int size() const { return peers_.size(); }
    std::size_t capacity() const { return capacity_; }

    // Say what this rank is about to do. The next phase tells the others, and raises Mismatch on all ranks if two
    // differ; unless the caller compares himself.
    void open(const Call& call, std::chrono::milliseconds timeout, bool compares = true);
    // The time for what is left of the call begins only now.
    void renew() { deadline_ = Clock::time_point{}; }
    // The first rank whose call differs from that of rank 0; -1 if there is none. Asked after the first phase.
    int differs() const;

    std::byte* mine();
    void phase();
    const std::byte* theirs(int rank) const;

    // What a rank has opened; to be asked after the first phase of a call.
    const Call& call(int rank) const;
    // The largest Call::longest of all ranks, likewise.
    std::uint64_t longest() const;
    // How many ranks have their data where the others can map it, likewise.
    int loans() const;

private:
    struct Post;

    Post& post(int rank) const;
    std::byte* slot(int rank, std::uint64_t phase) const;
    bool behind(int rank) const;
    bool anyone_behind() const;
    void look_around();
    std::string late() const;

    const std::shared_ptr<const Mapping> memory_;
    std::byte* const place_;
    Peers& peers_;
    const std::size_t capacity_;
    std::uint64_t phase_ = 0;
    Call call_;
    bool compares_ = false;
    Clock::time_point deadline_;
    std::chrono::milliseconds timeout_{0};
};

}  // namespace dist_prims
