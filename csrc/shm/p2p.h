// Point-to-point messages between the ranks of one host, independent of the collectives and not ordered with them.
//
// Each ordered pair of ranks has a ring buffer with one writer and one reader. A message is a header followed by its
// bytes. The sender cuts it where the ring is full, so a ring of any length carries messages of any length.
//
//     sender      written ->  | header | bytes ......... | header | bytes ...
//     receiver    read    ->  |  ... and publishes what it has read, so that the sender may continue
//
// A message matches the first posted receive with its sender and tag. An unexpected message (one without a posted
// receive) stays in the ring, which is the back-pressure on the sender. If a receive waits for a message behind it, the
// unexpected message is copied to a buffer.
//
// A request is a send or a receive of this rank. To make progress is to move the bytes of all requests of this rank, as
// far as the rings allow at present. A thread in wait() makes progress until its own request is finished. A request
// with a `done` callback may have no such thread, so there is a progress thread. Handover, under `mutex_`: `waiting_`
// counts the threads in wait(). While it is above 0, or no request is unfinished, the progress thread is idle: it
// sleeps on `wake_`. The last thread that leaves wait() wakes it if a request is unfinished, and so does post() for a
// request with `done` if no thread is in wait().
//
// Memory order, for any processor. One rank stores each counter of a ring, and its threads hold `mutex_`, so a rank
// loads its own counter without an order:
// 1. The sender stores `written` after the header and the bytes (release). The receiver loads it before it reads them
//    (acquire).
// 2. The receiver stores `read` after it has copied the bytes and taken their lines (shared_copies.h; release). The
//    sender loads it before it overwrites them (acquire).
// 3. All four accesses are sequentially consistent, since Membership::sleep() may wait for each of them.
// 4. A rank stores its flag `left` in the membership after its last message (release). depends_on() loads the flag
//    before `written` (acquire): if the flag is set and the ring is empty, no message from that rank will come.
// 5. `mutex_` orders the requests and their memory between the threads of a rank.
// tests/csrc/test_memory_order.py explores all executions of 1. to 3.
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
#include <vector>

#include "../common/claim.h"
#include "../common/thread.h"
#include "../common/trace.h"
#include "membership.h"
#include "wait_policy.h"

namespace dist_prims {

// Must be made by make_shared: the progress thread shares ownership. The progress thread lives until close(). Public
// functions may be called from any thread of the rank.
class PointToPoint : public std::enable_shared_from_this<PointToPoint> {
public:
    static constexpr int kAnyone = -1;
    using Tag = std::uint64_t;
    static constexpr Tag kCollectiveFlag = Tag{1} << 63;  // a bit above the tags of users
    static constexpr Tag kBarrierTag = Tag{1} << 62;      // of monitored barriers
    static constexpr Tag kSignalFlag = Tag{1} << 61;      // of signals of windows, which are messages without data
    // The tag of a signal of a window. The numbers of windows begin again at 0 after 2^61 windows.
    static constexpr Tag signal_tag(std::uint64_t window) { return kSignalFlag | (window & (kSignalFlag - 1)); }

    // Receives the result of a request (null: success), on a thread that holds `mutex_`. It may return a callback,
    // which the same thread calls later without the lock, and which may block.
    using Done = std::function<std::function<void()>(std::exception_ptr)>;

    struct LocalRequest {
        bool outgoing;
        int peer;  // kAnyone until the message of a receive from any rank is known
        Tag tag;
        std::byte* data;  // of the caller; a send only reads it
        std::size_t bytes;
        Clock::time_point deadline;
        std::chrono::milliseconds timeout;
        Done done;
        ClaimPtr claim{};       // of a receive from any rank that is posted at the transport between hosts as well
        std::size_t moved = 0;  // bytes of a send that have been written to the ring
        bool header_sent = false, finished = false;
        std::exception_ptr error{};
        TraceTransfer trace{};
    };
    using Handle = std::shared_ptr<LocalRequest>;

    static std::size_t bytes(int size) { return rings_begin(size, size); }
    // The offset of the ring buffers to which a rank writes in these bytes. Those of the next rank follow.
    static std::size_t rings_begin(int size, int rank);

    // For tests: lets the counters of new memory begin at `value`, a multiple of 64. To be called before a rank uses
    // the memory.
    static void set_counters(std::byte* place, int size, std::uint64_t value);

    // `place` points to bytes(size) of the shared memory.
    PointToPoint(std::shared_ptr<const Mapping> memory, std::byte* place, std::shared_ptr<Membership> membership);

    // Post a send or a receive, and return it.
    // data: must stay valid until the request is finished.
    // timeout: from now on; a request that is not finished then ends the group.
    // done: null if the caller calls wait(); otherwise the request is finished even if no thread waits for it.
    // claim: see claim.h; null if the receive is posted here only.
    Handle send(int to, Tag tag, const std::byte* data, std::size_t bytes, std::chrono::milliseconds timeout,
                Done done);
    Handle receive(int from, Tag tag, std::byte* data, std::size_t bytes, std::chrono::milliseconds timeout, Done done,
                   ClaimPtr claim = nullptr);
    // Removes a receive whose claim a message from another host has taken. `done` is not called.
    void withdraw(const Handle& request);

    // Returns true when the request is finished, with or without an error; false after `limit`.
    bool wait(const Handle& request, std::chrono::milliseconds limit);

    bool is_finished(const Handle& request);

    // The wait for a request, as an edge of the wait-for graph.
    WaitGraph::Wait wait_edge(const Handle& request);

    // Describes a request for an error message.
    std::string text(const LocalRequest& request) const;

    // Ends the group unless it has ended. All requests, now and later, fail with the reason of the group's end. After
    // this no request reads or writes its memory.
    void end();
    // Fails all requests, now and later, with `reason`, because this rank leaves the group (null: "the group has been
    // destroyed"), and ends the progress thread. May be called any number of times.
    void close(std::exception_ptr reason);

private:
    struct RingState;
    // A message that arrives in a ring. `request` is null while no posted receive matches; `buffer` holds its bytes
    // until then.
    struct IncomingMessage {
        int from;
        Tag tag;
        std::size_t bytes, moved = 0;
        Handle request;
        std::unique_ptr<std::byte[]> buffer;
    };
    using IncomingHandle = std::shared_ptr<IncomingMessage>;

    // The shared memory.
    RingState& ring_state(int from, int to) const;
    std::byte* ring(int from, int to) const;
    void advance(std::uint64_t& count, std::size_t& offset, std::size_t bytes) const;
    std::uint64_t unread(int from, int to) const;
    bool is_blocked(int rank, const WaitGraph::Wait& wait) const;
    static WaitGraph::Wait wait_edge(const LocalRequest& request);

    // Called with `mutex_` locked, which they keep locked.
    void start_request(const Handle& request);
    bool match_unexpected(const Handle& request);
    bool progress();
    bool write_ring(int to);
    bool read_ring(int from);
    bool buffer_unexpected(IncomingMessage& message);
    bool has_posted_receive(int from) const;
    void match_posted(const IncomingHandle& message);
    void deliver(const IncomingHandle& message);
    bool depends_on(const LocalRequest& request, int peer) const;
    void finish(const Handle& request, std::exception_ptr error);
    void fail_all(std::exception_ptr error);
    void fail_group(const std::string& why);
    Handle earliest_pending() const;

    // Called with `mutex_` locked by `lock`, which they unlock meanwhile.
    void run_callbacks(std::unique_lock<std::mutex>& lock);
    bool progress_until(const Handle& request, Clock::time_point until, std::unique_lock<std::mutex>& lock);
    void progress_once(std::unique_lock<std::mutex>& lock, WaitPolicy& wait_policy, LocalDiagnosis& diagnosis);

    // Called without the lock.
    Handle post(LocalRequest request);
    bool try_progress(const Handle& request);
    void publish_in_wait_graph(const Handle& request, LongWait& long_wait);
    void check_failures(const Handle& request, LocalDiagnosis& diagnosis);
    void run_progress();

    const std::shared_ptr<const Mapping> memory_;
    std::byte* const place_;
    const std::shared_ptr<Membership> shared_membership_;
    Membership& membership_;
    const std::size_t ring_bytes_;

    std::mutex mutex_;                              // of all below
    std::vector<std::deque<Handle>> outgoing_;      // by receiver: the sends whose bytes are not all in the ring
    std::list<Handle> posted_receives_;             // receives without a matching message
    std::vector<IncomingHandle> incoming_;          // by sender: the message that is partly read
    std::list<IncomingHandle> unexpected_;          // messages without a matching receive
    std::vector<std::size_t> write_offsets_;        // by receiver: where the next bytes go in its ring
    std::vector<std::size_t> read_offsets_;         // by sender: where the next bytes are in its ring
    std::vector<std::function<void()>> callbacks_;  // what Done has returned, not called yet
    std::exception_ptr closed_;                     // why all requests fail; null as long as they do not
    int waiting_ = 0;                               // threads in wait()
    bool ending_ = false, progress_is_idle_ = false;
    std::condition_variable wake_;  // of the progress thread
    Thread progress_thread_;
};

}  // namespace dist_prims
