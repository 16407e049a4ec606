#include "p2p.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <optional>
#include <utility>

#include "shared_copies.h"

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kAllRings = 1 << 20;                           // bytes of all ring buffers to one rank
constexpr std::size_t kLeastRing = 16 << 10, kMostRing = 256 << 10;  // bytes of one ring buffer
constexpr std::size_t kPiece = 32 << 10;  // bytes that are published at once: the receiver may copy them meanwhile
constexpr auto kGrace = 100us;            // the progress thread begins later: most requests are waited for at once

struct MessageHeader {
    alignas(kCacheLine) PointToPoint::Tag tag;
    std::uint64_t bytes;
};

std::size_t ring_bytes_for(int size) {
    return std::clamp(kAllRings / static_cast<std::size_t>(size), kLeastRing, kMostRing) / kCacheLine * kCacheLine;
}

std::size_t index(int rank) {
    return static_cast<std::size_t>(rank);
}

}  // namespace

// The state of one ring buffer, in front of its bytes: how many bytes were written and read in all, modulo 2^64. The
// writer and the reader each keep their own offset.
struct PointToPoint::RingState {
    alignas(kCacheLine) std::atomic<std::uint64_t> written;
    alignas(kCacheLine) std::atomic<std::uint64_t> read;
};

std::size_t PointToPoint::rings_begin(int size, int rank) {
    return index(rank) * index(size) * (sizeof(RingState) + ring_bytes_for(size));
}

void PointToPoint::set_counters(std::byte* place, int size, std::uint64_t value) {
    for (std::byte* end = place + bytes(size); place != end; place += sizeof(RingState) + ring_bytes_for(size)) {
        reinterpret_cast<RingState*>(place)->written.store(value);
        reinterpret_cast<RingState*>(place)->read.store(value);
    }
}

PointToPoint::PointToPoint(std::shared_ptr<const Mapping> memory, std::byte* place,
                           std::shared_ptr<Membership> membership)
    : memory_(std::move(memory)),
      place_(place),
      shared_membership_(std::move(membership)),
      membership_(*shared_membership_),
      ring_bytes_(ring_bytes_for(membership_.size())),
      outgoing_(index(membership_.size())),
      incoming_(index(membership_.size())),
      write_offsets_(index(membership_.size())),
      read_offsets_(index(membership_.size())) {
    membership_.wait_graph().verify_by(
        [this](int rank, const WaitGraph::Wait& wait) { return is_blocked(rank, wait); });
}

std::string PointToPoint::text(const LocalRequest& request) const {
    const std::string peer_text =
        request.peer == kAnyone ? "any rank" : "rank " + std::to_string(membership_.group_rank(request.peer));
    if ((request.tag & (kCollectiveFlag | kSignalFlag)) == kSignalFlag)
        return (request.outgoing ? "signal(to " : "wait_signal(from ") + peer_text + ", window " +
               std::to_string(request.tag & ~kSignalFlag) + ")";
    const bool is_barrier = request.tag == kBarrierTag;
    const bool is_of_user = request.tag < kSignalFlag && !is_barrier;
    const std::string tag = is_of_user ? ", tag " + std::to_string(request.tag) : "";
    return (is_barrier ? "monitored_barrier: " : "") + std::string(request.outgoing ? "send(" : "recv(") +
           std::to_string(request.bytes) + " bytes " + (request.outgoing ? "to " : "from ") + peer_text + tag + ")";
}

PointToPoint::RingState& PointToPoint::ring_state(int from, int to) const {
    return *reinterpret_cast<RingState*>(ring(from, to) - sizeof(RingState));
}

std::byte* PointToPoint::ring(int from, int to) const {
    return place_ + index(from * membership_.size() + to) * (sizeof(RingState) + ring_bytes_) + sizeof(RingState);
}

// The bytes in a ring.
std::uint64_t PointToPoint::unread(int from, int to) const {
    const RingState& ring_state = this->ring_state(from, to);
    return ring_state.written.load() - ring_state.read.load();
}

// Moves the count and the offset of one end of a ring past `bytes`. No header and no piece crosses the end of the ring,
// so the offset reaches the end exactly.
void PointToPoint::advance(std::uint64_t& count, std::size_t& offset, std::size_t bytes) const {
    count += bytes;
    offset += bytes;
    if (offset == ring_bytes_) offset = 0;
}

PointToPoint::Handle PointToPoint::send(int to, Tag tag, const std::byte* data, std::size_t bytes,
                                        std::chrono::milliseconds timeout, Done done) {
    auto* const readable = const_cast<std::byte*>(data);
    return post({true, to, tag, readable, bytes, Clock::now() + timeout, timeout, std::move(done)});
}

PointToPoint::Handle PointToPoint::receive(int from, Tag tag, std::byte* data, std::size_t bytes,
                                           std::chrono::milliseconds timeout, Done done, ClaimPtr claim) {
    return post({false, from, tag, data, bytes, Clock::now() + timeout, timeout, std::move(done), std::move(claim)});
}

void PointToPoint::withdraw(const Handle& request) {
    const std::lock_guard lock(mutex_);
    posted_receives_.remove(request);
    request->done = nullptr;
    request->finished = true;
}

PointToPoint::Handle PointToPoint::post(LocalRequest new_request) {
    auto request = std::make_shared<LocalRequest>(std::move(new_request));
    membership_.check_abort([&] { return text(*request); });
    std::unique_lock lock(mutex_);
    if (closed_) std::rethrow_exception(closed_);
    // The progress thread begins before the first request that needs it: if it cannot, the request does not start.
    if (request->done && !progress_thread_.has_begun())
        progress_thread_ = Thread(membership_.own_name() + ": the thread of its messages",
                                  [self = shared_from_this()] { self->run_progress(); });
    start_request(request);
    if (!request->finished && request->done && progress_is_idle_ && waiting_ == 0) wake_.notify_all();
    run_callbacks(lock);
    return request;
}

// Puts the request into its queue or matches it, and moves what can be moved at once.
void PointToPoint::start_request(const Handle& request) {
    if (request->outgoing) {
        auto& queue = outgoing_[index(request->peer)];
        queue.push_back(request);
        if (queue.size() == 1) write_ring(request->peer);
        return;
    }
    if (match_unexpected(request)) return;
    posted_receives_.push_back(request);
    for (int peer = 0; peer < membership_.size(); ++peer) {
        if (request->peer == peer || request->peer == kAnyone) read_ring(peer);
    }
}

// Matches the receive with an unexpected message; false if there is none.
bool PointToPoint::match_unexpected(const Handle& request) {
    const auto match = std::find_if(unexpected_.begin(), unexpected_.end(), [&](const IncomingHandle& message) {
        return message->tag == request->tag && (request->peer == kAnyone || request->peer == message->from);
    });
    if (match == unexpected_.end() || !take_claim(request->claim)) return false;
    const IncomingHandle message = *match;
    unexpected_.erase(match);
    message->request = request;
    request->peer = message->from;
    if (message->moved == message->bytes) deliver(message);
    return true;
}

// Moves all bytes that can be moved; returns whether any were.
bool PointToPoint::progress() {
    bool moved = false;
    for (int peer = 0; peer < membership_.size(); ++peer) {
        if (!outgoing_[index(peer)].empty()) moved |= write_ring(peer);
        moved |= read_ring(peer);
    }
    return moved;
}

// Writes the queued sends to a rank into its ring, as far as there is space; returns whether any byte was written.
bool PointToPoint::write_ring(int to) {
    RingState& ring_state = this->ring_state(membership_.rank(), to);
    std::byte* ring = this->ring(membership_.rank(), to);
    std::size_t& offset = write_offsets_[index(to)];
    std::uint64_t written = ring_state.written.load(std::memory_order_relaxed);  // no other rank stores it
    const std::uint64_t before = written;
    auto& queue = outgoing_[index(to)];
    while (!queue.empty()) {
        const Handle request = queue.front();
        const std::size_t free = ring_bytes_ - (written - ring_state.read.load());
        if (free == 0) break;
        if (!request->header_sent) {
            // 1. The header. It fits, because all lengths in the ring are multiples of a cache line.
            const MessageHeader header{request->tag, request->bytes};
            std::memcpy(ring + offset, &header, sizeof(header));
            advance(written, offset, sizeof(header));
            request->header_sent = true;
        } else {
            // 2. A piece of the bytes.
            const std::size_t space = std::min({free, ring_bytes_ - offset, kPiece});
            const std::size_t piece = std::min(space, request->bytes - request->moved);
            std::memcpy(ring + offset, request->data + request->moved, piece);
            request->moved += piece;
            advance(written, offset, round_up_to_line(piece));
        }
        // 3. Publish what was written; a header together with the first piece, if that fits.
        if (request->moved == request->bytes) {
            queue.pop_front();
            ring_state.written.store(written);
            finish(request, nullptr);
        } else if (request->moved != 0) {
            ring_state.written.store(written);
        }
    }
    ring_state.written.store(written);
    if (written != before) membership_.wake(to);
    return written != before;
}

// Reads what a rank has written into the ring to this rank; returns whether any byte was read.
bool PointToPoint::read_ring(int from) {
    RingState& ring_state = this->ring_state(from, membership_.rank());
    const std::byte* ring = this->ring(from, membership_.rank());
    std::size_t& offset = read_offsets_[index(from)];
    std::uint64_t read = ring_state.read.load(std::memory_order_relaxed);  // no other rank stores it
    const std::uint64_t before = read;
    IncomingHandle& message = incoming_[index(from)];
    while (const std::size_t unread = ring_state.written.load() - read) {
        // 1. A header. It stays in the ring while no receive from that rank is posted; the tag may be another one.
        if (!message) {
            if (!has_posted_receive(from)) break;
            MessageHeader header;
            std::memcpy(&header, ring + offset, sizeof(header));
            message =
                std::make_shared<IncomingMessage>(IncomingMessage{from, header.tag, header.bytes, 0, nullptr, nullptr});
            match_posted(message);
            advance(read, offset, sizeof(header));
        } else {
            // 2. A piece of the bytes: into the memory of the receive if it has matched, otherwise into a buffer.
            const std::size_t piece = std::min({unread, ring_bytes_ - offset, message->bytes - message->moved});
            const bool direct = message->request && !message->buffer && message->bytes == message->request->bytes;
            if (!direct && !message->buffer && !buffer_unexpected(*message)) return true;  // the group has ended
            std::byte* const target = direct ? message->request->data : message->buffer.get();
            copy_and_take(target + message->moved, ring + offset, piece);
            message->moved += piece;
            advance(read, offset, round_up_to_line(piece));
        }
        // 3. The sender may use the space again. A complete message goes to its receive.
        ring_state.read.store(read);
        if (message->moved < message->bytes) continue;
        const IncomingHandle complete = std::exchange(message, nullptr);
        if (complete->request) deliver(complete);
    }
    if (read != before) membership_.wake(from);
    return read != before;
}

// Allocates a buffer for an unexpected message, or for one of another length than its receive. Without memory the group
// ends: no message behind this one can be received.
bool PointToPoint::buffer_unexpected(IncomingMessage& message) {
    message.buffer.reset(new (std::nothrow) std::byte[message.bytes]);
    if (message.buffer) return true;
    fail_group("no memory for a message of " + std::to_string(message.bytes) + " bytes from rank " +
               std::to_string(membership_.group_rank(message.from)) + ", tag " + std::to_string(message.tag) +
               ", that no receive of this length asks for while another receive waits; post its receive first");
    return false;
}

// Whether a posted receive may match a message from this rank. Otherwise the rank's messages can stay in the ring.
bool PointToPoint::has_posted_receive(int from) const {
    return std::any_of(posted_receives_.begin(), posted_receives_.end(),
                       [from](const Handle& request) { return request->peer == from || request->peer == kAnyone; });
}

// Matches a message, whose header has been read, with the first posted receive for it; otherwise the message is
// unexpected.
void PointToPoint::match_posted(const IncomingHandle& message) {
    const auto match = std::find_if(posted_receives_.begin(), posted_receives_.end(), [&](const Handle& request) {
        const bool is_from_peer = request->peer == kAnyone || request->peer == message->from;
        return request->tag == message->tag && is_from_peer && take_claim(request->claim);
    });
    if (match == posted_receives_.end()) {
        unexpected_.push_back(message);
        return;
    }
    message->request = *match;
    message->request->peer = message->from;
    posted_receives_.erase(match);
}

// Delivers a complete message to its receive.
void PointToPoint::deliver(const IncomingHandle& message) {
    const Handle& request = message->request;
    std::exception_ptr error;
    if (message->bytes != request->bytes) {
        error = std::make_exception_ptr(CommError(
            CommError::Kind::kMismatch, membership_.own_name() + ": rank " +
                                            std::to_string(membership_.group_rank(message->from)) + " has sent " +
                                            std::to_string(message->bytes) + " bytes for " + text(*request) +
                                            "; what is sent and the tensor that receives it must be of one size"));
    } else if (message->buffer) {
        std::memcpy(request->data, message->buffer.get(), message->bytes);
    }
    finish(request, error);
}

// Marks the request as finished, and calls its Done. An exception of Done becomes the error of the request.
void PointToPoint::finish(const Handle& request, std::exception_ptr error) {
    request->error = error;
    request->finished = true;
    if (!error) request->trace.end(request->outgoing, membership_.group_rank(request->peer), request->bytes);
    if (const Done done = std::exchange(request->done, nullptr)) {
        const auto thrown = caught([&] {
            if (auto callback = done(error)) callbacks_.push_back(std::move(callback));
        });
        if (thrown && !error) request->error = thrown;
    }
    if (waiting_ > 1) membership_.wake(membership_.rank());  // another thread may wait for it
}

// Finishes all requests with the error; null: the group has been destroyed. Later requests fail in post().
void PointToPoint::fail_all(std::exception_ptr error) {
    if (!error) error = std::make_exception_ptr(std::runtime_error("the group has been destroyed"));
    if (!closed_) closed_ = error;
    for (auto& queue : outgoing_) {
        for (const Handle& request : queue) finish(request, error);
        queue.clear();
    }
    for (const Handle& request : std::exchange(posted_receives_, {})) finish(request, error);
    for (IncomingHandle& message : incoming_) {
        if (const IncomingHandle partial = std::exchange(message, nullptr); partial && partial->request)
            finish(partial->request, error);
    }
    unexpected_.clear();
}

// Calls the callbacks, and those that are added meanwhile, without the lock.
void PointToPoint::run_callbacks(std::unique_lock<std::mutex>& lock) {
    while (!callbacks_.empty()) {
        auto callbacks = std::exchange(callbacks_, {});
        lock.unlock();
        for (const auto& callback : callbacks) caught(callback);
        callbacks.clear();
        lock.lock();
    }
}

bool PointToPoint::wait(const Handle& request, std::chrono::milliseconds limit) {
    const bool is_unlimited = limit == std::chrono::milliseconds::max();
    const auto until = is_unlimited ? Clock::time_point::max() : Clock::now() + limit;
    bool in_time = false;
    std::unique_lock lock(mutex_);
    ++waiting_;
    const auto error = caught([&] { in_time = progress_until(request, until, lock); });
    if (!lock) lock.lock();
    if (--waiting_ == 0 && progress_is_idle_ && earliest_pending()) wake_.notify_all();
    if (error) std::rethrow_exception(error);
    return in_time;
}

// Makes progress until the request is finished (true) or the time has come (false).
bool PointToPoint::progress_until(const Handle& request, Clock::time_point until, std::unique_lock<std::mutex>& lock) {
    if (request->finished) return true;
    WaitPolicy wait_policy(membership_);
    std::optional<LongWait> long_wait;
    bool in_time = true;
    const int peer = request->peer == kAnyone ? kAnyone : membership_.group_rank(request->peer);
    const TraceSpan span(TraceKind::kWait, request->bytes, peer);
    while (!request->finished && in_time) {
        // 1. As long as bytes move, this thread does not wait.
        if (!closed_ && progress()) {
            wait_policy = WaitPolicy(membership_);
            run_callbacks(lock);
            continue;
        }
        // 2. One turn of the wait, without the lock. A wait that sleeps is long: publish it, check for failures.
        membership_.note_core();
        const bool shares_core = membership_.shares_core(0, [&](int rank) { return depends_on(*request, rank); });
        lock.unlock();
        if (wait_policy.wait(shares_core, [&] { return try_progress(request); })) {
            in_time = Clock::now() < until;
            if (!long_wait) long_wait.emplace(membership_.wait_graph());
            publish_in_wait_graph(request, *long_wait);
            check_failures(request, long_wait->diagnosis);
        }
        lock.lock();
    }
    if (long_wait && request->error) long_wait->published.fail();
    return request->finished;
}

// Publishes the wait of this thread in the wait-for graph. While a background thread waits, the program of this rank
// continues, so a background thread publishes only the waits of a collective.
void PointToPoint::publish_in_wait_graph(const Handle& request, LongWait& long_wait) {
    WaitGraph::Wait wait = wait_edge(request);
    wait.in_background = in_background;
    if (!in_background || wait.in_collective) long_wait.published.set(wait);
}

WaitGraph::Wait PointToPoint::wait_edge(const Handle& request) {
    const std::lock_guard lock(mutex_);
    return wait_edge(*request);
}

WaitGraph::Wait PointToPoint::wait_edge(const LocalRequest& request) {
    const auto kind = request.outgoing ? WaitGraph::WaitKind::kSend : WaitGraph::WaitKind::kReceive;
    return {kind, (request.tag & kCollectiveFlag) != 0, request.peer == kAnyone ? WaitGraph::kAnyone : request.peer};
}

// Whether a wait that a rank has published still stands: a rank that can move bytes is not blocked. A wrong answer, if
// a counter changes between two loads, is corrected by the next look of the diagnosis.
bool PointToPoint::is_blocked(int rank, const WaitGraph::Wait& wait) const {
    if (wait.kind == WaitGraph::WaitKind::kSend) return unread(rank, wait.peer) >= ring_bytes_;
    for (int peer = 0; peer < membership_.size(); ++peer) {
        if ((wait.peer == peer || wait.peer == WaitGraph::kAnyone) && unread(peer, rank) != 0) return false;
    }
    return true;
}

// Makes progress for a thread that is about to sleep; returns whether it must not sleep.
bool PointToPoint::try_progress(const Handle& request) {
    std::unique_lock lock(mutex_);
    const bool moved = !closed_ && progress();
    run_callbacks(lock);
    return moved || request->finished || closed_ || ending_;
}

bool PointToPoint::is_finished(const Handle& request) {
    const std::lock_guard lock(mutex_);
    return request->finished;
}

// Whether a request cannot finish without the rank `peer`, so that it fails when `peer` has died or left: the request
// is unfinished, and the rings from the ranks that it may receive from hold no bytes.
bool PointToPoint::depends_on(const LocalRequest& request, int peer) const {
    if (request.finished || peer == membership_.rank()) return false;
    if (request.outgoing) return peer == request.peer;
    if (request.peer != kAnyone) return peer == request.peer && unread(peer, membership_.rank()) == 0;
    // A receive from any rank goes on while a ring holds bytes. When all rings are empty:
    // 1. A peer that has not left may be the sender, so the request depends on it: it fails if the peer dies.
    // 2. A peer that has left only matters if all others have left too: then no rank can send. With a claim the message
    //    may still come from another host, so not even then.
    bool all_left = !request.claim, all_empty = true;
    for (int rank = 0; rank < membership_.size(); ++rank) {
        all_left &= rank == membership_.rank() || membership_.has_left(rank);
        // Loaded after has_left(): see the memory order in p2p.h.
        all_empty &= unread(rank, membership_.rank()) == 0;
    }
    return all_empty && (all_left || !membership_.has_left(peer));
}

// Checks for failures in a wait that has moved nothing for a while. An error ends all requests.
void PointToPoint::check_failures(const Handle& request, LocalDiagnosis& diagnosis) {
    try {
        membership_.check_failures(
            [&](int peer) {
                const std::lock_guard lock(mutex_);
                return depends_on(*request, peer);
            },
            [&] {
                const std::lock_guard lock(mutex_);  // another thread may match it: that sets its peer
                return text(*request);
            });
        const std::unique_lock lock(mutex_);
        if (request->finished || Clock::now() <= request->deadline) return;
        if (membership_.is_final(diagnosis, {wait_edge(*request)}, request->timeout))
            membership_.throw_timeout(std::to_string(request->timeout.count()) + " ms in " + text(*request),
                                      diagnosis.verdict());
    } catch (const CommError&) {
        const auto error = std::current_exception();
        std::unique_lock lock(mutex_);
        fail_all(error);
        run_callbacks(lock);
    } catch (...) {  // the exception of a signal handler goes to the caller of wait(), too
        std::unique_lock lock(mutex_);
        fail_all(std::make_exception_ptr(CommError(CommError::Kind::kInterrupted,
                                                   membership_.own_name() + " was interrupted in " + text(*request))));
        run_callbacks(lock);
        lock.unlock();
        throw;
    }
}

// The unfinished request with the earliest deadline; null if there is none.
PointToPoint::Handle PointToPoint::earliest_pending() const {
    Handle earliest;
    const auto consider = [&earliest](const Handle& request) {
        if (!request || request->finished) return;
        if (!earliest || request->deadline < earliest->deadline) earliest = request;
    };
    for (const auto& queue : outgoing_) std::for_each(queue.begin(), queue.end(), consider);
    std::for_each(posted_receives_.begin(), posted_receives_.end(), consider);
    for (const IncomingHandle& message : incoming_) {
        if (message) consider(message->request);
    }
    return earliest;
}

// Ends the group because of an error of this rank alone.
void PointToPoint::fail_group(const std::string& why) {
    membership_.give_notice({CommError::Kind::kInterrupted, membership_.group_rank(membership_.rank())});
    const std::string text = membership_.own_name() + ": " + why;
    fail_all(std::make_exception_ptr(CommError(CommError::Kind::kInterrupted, text)));
}

// The progress thread.
void PointToPoint::run_progress() {
    in_background = true;
    std::unique_lock lock(mutex_);
    WaitPolicy wait_policy(membership_);
    LocalDiagnosis diagnosis;  // of the request with the earliest deadline
    while (!ending_) {
        if (!caught([&] { progress_once(lock, wait_policy, diagnosis); })) continue;
        if (!lock) lock.lock();
        caught([this] { fail_group("the thread that moves messages has failed"); });
        run_callbacks(lock);
    }
}

// One turn of the progress thread. It is idle while there is no request, or another thread makes progress in wait().
void PointToPoint::progress_once(std::unique_lock<std::mutex>& lock, WaitPolicy& wait_policy,
                                 LocalDiagnosis& diagnosis) {
    const Handle request = earliest_pending();
    if (!request || waiting_ > 0 || closed_) {
        progress_is_idle_ = true;
        wait_for_notification(wake_, lock);
        progress_is_idle_ = false;
        wait_policy = WaitPolicy(membership_);
        diagnosis = LocalDiagnosis();
        wake_.wait_for(lock, kGrace);
    } else if (progress()) {
        wait_policy = WaitPolicy(membership_);
        diagnosis = LocalDiagnosis();
        run_callbacks(lock);
    } else {
        lock.unlock();
        if (wait_policy.wait(true, [&] { return try_progress(request); })) check_failures(request, diagnosis);
        lock.lock();
    }
}

void PointToPoint::end() {
    // An earlier notice stands, and check_abort() throws what it says.
    membership_.give_notice({CommError::Kind::kInterrupted, membership_.group_rank(membership_.rank())});
    const auto reason =
        caught([this] { membership_.check_abort([] { return std::string("a message that was under way"); }); });
    std::unique_lock lock(mutex_);
    fail_all(reason);
    run_callbacks(lock);
}

void PointToPoint::close(std::exception_ptr reason) {
    Thread progress_thread;
    {
        std::unique_lock lock(mutex_);
        ending_ = true;
        fail_all(reason);  // from here on no request and no progress thread starts
        progress_thread = std::move(progress_thread_);
        wake_.notify_all();
        membership_.wake(membership_.rank());
        run_callbacks(lock);
    }
    progress_thread.end();
}

}  // namespace dist_prims
