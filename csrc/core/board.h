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
// The post is a store with release, the wait a load with acquire of a counter that only its owner writes, on a cache
// line of its own. That is all the synchronisation there is, on x86 and on Arm alike.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "attach.h"
#include "memory.h"
#include "types.h"

namespace dist_prims {

// What goes wrong between ranks. After a Mismatch the group can go on; after the others it cannot.
class CommError : public std::runtime_error {
public:
    enum class Kind { kMismatch, kPeerDied, kPeerLeft, kTimeout, kInterrupted };
    CommError(Kind kind, const std::string& message) : std::runtime_error(message), kind(kind) {}
    const Kind kind;
};

class Board {
public:
    // How many bytes of memory a board for `size` ranks takes with two slots of `capacity` bytes for each.
    static std::size_t bytes(int size, std::size_t capacity);

    Board(std::shared_ptr<const Mapping> memory, int rank, int size, std::size_t capacity);
    ~Board();
    Board(const Board&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }
    std::size_t capacity() const { return capacity_; }

    // Say what this rank is about to do. The next phase tells the others, and raises Mismatch on all ranks if two
    // differ.
    void open(const Call& call, std::chrono::milliseconds timeout);

    std::byte* mine();
    void phase();
    const std::byte* theirs(int rank) const;

    // The largest Call::longest of all ranks; to be asked after the first phase of a call.
    std::uint64_t longest() const;

    // Called now and then while waiting, on the waiting thread; what it throws ends the wait.
    void on_wait(std::function<void()> interrupt) { interrupt_ = std::move(interrupt); }

    // Once all ranks have posted for the first time: notice when one of their processes ends.
    void watch_peers();

    // Tell the others that this rank will not come back: those who wait for it, or will, get an error.
    void leave();

    // End the wait of another thread of this rank with an error.
    void stop() { stopped_.store(true, std::memory_order_release); }

private:
    struct Post;
    struct Notice;
    class Patience;

    Post& post(int rank) const;
    Notice& notice() const;
    std::byte* slot(int rank, std::uint64_t phase) const;
    void check_peers();
    void heed_notice();
    void compare() const;
    void look_around();
    void give_notice(CommError::Kind kind, int culprit);
    [[noreturn]] void give_up(CommError::Kind kind, int culprit);
    std::string complaint(CommError::Kind kind, int culprit) const;
    std::string late() const;

    const std::shared_ptr<const Mapping> memory_;
    const int rank_, size_;
    const std::size_t capacity_;
    std::uint64_t phase_ = 0;
    Call call_;
    bool opened_ = false;
    Clock::time_point deadline_;
    std::chrono::milliseconds timeout_{0};
    std::vector<Descriptor> peers_;  // a pidfd of each, where the kernel gives one
    std::function<void()> interrupt_;
    Clock::time_point interrupted_;
    std::atomic<bool> stopped_{false};
};

}  // namespace dist_prims
