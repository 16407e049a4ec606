// Messages from rank to rank of one host, beside the collectives and in no order with them.
//
// Each pair of ranks has a lane for each direction: a ring of bytes with one writer and one reader. A message is a
// header and its bytes; it is cut where the ring is full, so a lane of any length carries messages of any length.
//
//     sender      written ->  | header | bytes ......... | header | bytes ...
//     receiver    read    ->  |  ... and writes what it has read, so that the sender may go on
//
// A message is received by the first receive that asks for its sender and tag. One that nobody asks for stays in the
// lane, unless another behind it is waited for: then it is put aside. Whoever waits moves everything that can be moved;
// for letters that nobody waits for there is a thread, the carrier.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "peers.h"

namespace dist_prims {

class Mail {
public:
    static constexpr int kAnyone = -1;
    using Tag = std::uint64_t;
    // Notes how it ended (null: well) and returns whom to tell, who may take his time.
    using Done = std::function<std::function<void()>(std::exception_ptr)>;

    // A message under way, on one of its ends.
    struct Letter {
        bool outgoing;
        int peer;  // of a receive from anyone: kAnyone until it is known
        Tag tag;
        std::byte* data;  // of an outgoing letter: only read
        std::size_t bytes;
        Clock::time_point deadline;
        std::chrono::milliseconds timeout;
        Done done;
        std::size_t moved = 0;
        bool announced = false, finished = false;
        std::exception_ptr error{};
    };
    using Handle = std::shared_ptr<Letter>;

    static std::size_t bytes(int size);

    // `place`: bytes(size) of the shared memory.
    Mail(std::shared_ptr<const Mapping> memory, std::byte* place, Peers& peers);
    ~Mail();

    // The data must stay until the letter is finished.
    Handle send(int to, Tag tag, const std::byte* data, std::size_t bytes, std::chrono::milliseconds timeout,
                Done done);
    Handle receive(int from, Tag tag, std::byte* data, std::size_t bytes, std::chrono::milliseconds timeout, Done done);

    // Return when it is finished, however; false if that takes longer than `limit`.
    bool wait(const Handle& letter, std::chrono::milliseconds limit);

    bool is_finished(const Handle& letter);

    // What a letter is, in words.
    std::string text(const Letter& letter) const;

    // Whatever is under way ends with `reason`, and so does what comes.
    void close(std::exception_ptr reason);

private:
    struct Lane;
    // What comes in on a lane: for whom (nobody has asked yet: null), and where it is put until then.
    struct Parcel {
        int from;
        Tag tag;
        std::size_t bytes, moved = 0;
        Handle letter;
        std::unique_ptr<std::byte[]> aside;
    };
    using ParcelHandle = std::shared_ptr<Parcel>;

    Lane& lane(int from, int to) const;
    std::byte* ring(int from, int to) const;
    Handle post(Letter letter);
    void start(const Handle& letter);
    bool claim(const Handle& letter);
    bool progress();
    bool moves(const Handle& letter);
    bool push(int to);
    bool pull(int from);
    bool is_wanted(int from) const;
    void meet(const ParcelHandle& parcel);
    void deliver(const ParcelHandle& parcel);
    bool is_empty(int from) const;
    bool needs(const Letter& letter, int peer) const;
    void finish(const Handle& letter, std::exception_ptr error);
    void fail_all(std::exception_ptr error);
    void tell(std::unique_lock<std::mutex>& lock);
    void look_around(const Handle& letter);
    void carry();
    Handle under_way() const;

    const std::shared_ptr<const Mapping> memory_;
    std::byte* const place_;
    Peers& peers_;
    const std::size_t ring_bytes_;

    std::mutex mutex_;                          // of all below
    std::vector<std::deque<Handle>> outgoing_;  // by receiver
    std::list<Handle> expected_;                // receives that no message has met yet
    std::vector<ParcelHandle> incoming_;        // by sender: what its lane is in the middle of
    std::list<ParcelHandle> aside_;             // messages that no receive has met yet
    std::vector<std::function<void()>> to_tell_;
    std::exception_ptr closed_;
    int waiting_ = 0;
    bool ending_ = false, parked_ = false;
    std::condition_variable wake_;
    std::thread carrier_;
};

}  // namespace dist_prims
