// The way of a request: send() or receive() posts it, start() adds it to pending_. Then exactly one thread ends it: a
// thread in wait(), the thread of this class (run), or, for a message that comes in shared memory, a thread of
// PointToPoint. `is_awaited` and `state`, under the lock, decide which one. finish() calls `done`.
#include "user_messages.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <thread>
#include <utility>

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr auto kLookInterval = 1ms, kIdleLookInterval = 5ms;  // of the thread
constexpr int kIdleLooks = 20;                                // without a request; then the thread sleeps
constexpr std::chrono::steady_clock::duration kShortestPause = 20us, kLongestPause = 1ms;
constexpr auto kBetweenChecks = 10ms;  // for failures, and for the end of another thread's wait

// The kind of a CommError; none for another exception.
std::optional<CommError::Kind> kind_of(const std::exception_ptr& error) {
    try {
        std::rethrow_exception(error);
    } catch (const CommError& failure) {
        return failure.kind;
    } catch (...) {
        return std::nullopt;
    }
}

}  // namespace

struct UserMessages::Request {
    Done done;
    Transport::Owner owner;        // of the memory
    RemotePeers::Handle remote{};  // the message at the transport; null when the request is over
    PointToPoint::Handle local{};  // the receive in shared memory, of a receive from any rank
    int source = Transport::kAnyone;
    bool came_in_shared_memory = false;  // from a rank of this host
    bool is_awaited = false;             // by a thread, which then ends the request
    State state = State::kOpen;
};

UserMessages::Handle UserMessages::send(int peer, int tag, const Memory& memory, Milliseconds timeout, Done done) {
    auto request = std::make_shared<Request>(Request{std::move(done), memory.owner});
    request->remote = remote_.send(peer, tag, memory.data, memory.bytes, timeout, memory.owner);
    return start(request);
}

UserMessages::Handle UserMessages::receive(int peer, int tag, const Memory& memory, Milliseconds timeout, Done done) {
    auto request = std::make_shared<Request>(Request{std::move(done), memory.owner});
    if (peer == Transport::kAnyone && remote_.has_claims()) {
        receive_from_any(tag, memory, timeout, request);
    } else {
        request->remote = remote_.receive(peer, tag, memory.data, memory.bytes, timeout, memory.owner);
        request->source = peer;
    }
    return start(request);
}

// Posts a receive in both places. The callback of PointToPoint runs when the message has come in shared memory.
void UserMessages::receive_from_any(int tag, const Memory& memory, Milliseconds timeout, const Handle& request) {
    const auto claim = std::make_shared<Claim>();
    const auto local_timeout = timeout + RemotePeers::kLocalMargin;
    request->local = p2p_.receive(
        PointToPoint::kAnyone, static_cast<PointToPoint::Tag>(tag), memory.data, memory.bytes, local_timeout,
        [weak = weak_from_this(), request](std::exception_ptr error) -> std::function<void()> {
            const auto self = weak.lock();
            return self ? self->finish(request, error, true) : nullptr;
        },
        claim);
    auto remote = remote_.receive_from_any(tag, memory.data, memory.bytes, timeout, memory.owner, claim);
    const std::lock_guard lock(mutex_);
    if (request->state == State::kOpen) request->remote = std::move(remote);
}

// Called when the request has been posted. The request may be over already.
UserMessages::Handle UserMessages::start(const Handle& request) {
    if (const auto remote = remote_of(request); remote && RemotePeers::is_done(remote)) {
        request->is_awaited = true;  // no other thread knows it
        end_with(request, [&] { remote_.wait(remote); });
        return request;
    }
    const std::lock_guard lock(mutex_);
    if (request->state != State::kOpen) return request;
    if (close_reason_) std::rethrow_exception(close_reason_);
    if (!thread_.has_begun())
        thread_ = Thread(membership_.own_name() + ": the thread of its messages between hosts",
                         [self = shared_from_this()] { self->run(); });
    pending_.insert(request);
    if (std::exchange(is_asleep_, false)) wakes_.notify_all();
    return request;
}

RemotePeers::Handle UserMessages::remote_of(const Handle& request) {
    const std::lock_guard lock(mutex_);
    return request->remote;
}

int UserMessages::source(const Request& request) const {
    return request.came_in_shared_memory ? membership_.group_rank(request.local->peer) : request.source;
}

void UserMessages::wait(const Handle& request, Milliseconds limit) {
    const auto until = limit == Milliseconds::max() ? Clock::time_point::max() : Clock::now() + limit;
    if (is_first_to_wait(request, limit, until)) {
        end_with(request, [&] { wait_for_remote(request, limit, until); });
        std::unique_lock lock(mutex_);  // another thread may be about to end it
        while (request->state != State::kOver) wait_for_notification(changed_, lock);
    }
}

// Whether this thread is the first to wait for the request: it must end it. If not, returns when the request is over.
bool UserMessages::is_first_to_wait(const Handle& request, Milliseconds limit, Clock::time_point until) {
    std::unique_lock lock(mutex_);
    while (request->state != State::kOver) {
        if (!std::exchange(request->is_awaited, true)) return true;
        if (Clock::now() >= until)
            membership_.throw_timeout(std::to_string(limit.count()) +
                                      " ms in a wait for a message for which another thread waits as well");
        changed_.wait_for(lock, kBetweenChecks);
    }
    return false;
}

void UserMessages::wait_for_remote(const Handle& request, Milliseconds limit, Clock::time_point until) {
    const auto remote = remote_of(request);
    if (!remote) return;
    if (until < remote->deadline) {
        remote->timeout = limit;
        remote->deadline = until;
    }
    if (request->local) wait_for_either(request, remote);
    if (remote_of(request)) remote_.wait(remote);
}

// Returns when a message has come at the transport or in shared memory. No call waits for both, so this one polls.
void UserMessages::wait_for_either(const Handle& request, const RemotePeers::Handle& remote) {
    auto next_check = Clock::now() + kBetweenChecks;
    for (auto pause = kShortestPause; remote_of(request); pause = std::min(2 * pause, kLongestPause)) {
        remote_.progress();
        if (RemotePeers::is_done(remote)) return;
        std::this_thread::sleep_for(pause);
        if (Clock::now() < next_check) continue;
        remote_.check(remote);
        next_check = Clock::now() + kBetweenChecks;
    }
}

// Runs `act`, which waits for the request, and ends the request: with the CommError that `act` throws, or without an
// error. Throws any other exception of `act`, which a signal handler has thrown.
void UserMessages::end_with(const Handle& request, const std::function<void()>& act) {
    std::exception_ptr error = caught(act), interrupt;
    if (error && !kind_of(error)) {
        interrupt = error;
        error = std::make_exception_ptr(
            CommError(CommError::Kind::kInterrupted, membership_.own_name() + " was interrupted in a message"));
    }
    const auto callback = finish(request, error, false);
    if (request->local) {
        if (error && kind_of(error) != CommError::Kind::kMismatch)
            p2p_.end();  // a message may be on its way into the memory
        else
            p2p_.withdraw(request->local);
    }
    if (callback) caught(callback);
    if (interrupt) std::rethrow_exception(interrupt);
}

// Calls `done` of the request, unless another thread does. Returns the callback that `done` has returned, to be run
// without locks. `in_shared_memory`: the message has come there, and the caller has the lock of PointToPoint.
std::function<void()> UserMessages::finish(const Handle& request, std::exception_ptr error, bool in_shared_memory) {
    RemotePeers::Handle remote;  // destroyed without the lock
    {
        const std::lock_guard lock(mutex_);
        if (request->state != State::kOpen) return nullptr;
        request->state = State::kEnding;
        request->came_in_shared_memory = in_shared_memory;
        remote = std::exchange(request->remote, nullptr);
        if (remote) request->source = remote->peer;
        pending_.erase(request);
    }
    remote = nullptr;  // before `done`, which may free the memory
    std::function<void()> callback;
    caught([&] { callback = std::exchange(request->done, nullptr)(error); });
    const std::lock_guard lock(mutex_);
    request->state = State::kOver;
    changed_.notify_all();
    return callback;
}

// The body of the thread.
void UserMessages::run() {
    in_background = true;
    std::unique_lock lock(mutex_);
    for (int idle = 0; !close_reason_;) {
        // 1. Sleep: after a time without requests until start() adds one, otherwise until the next look.
        if (idle == kIdleLooks) {
            is_asleep_ = true;
            while (!close_reason_ && is_asleep_) wait_for_notification(wakes_, lock);
        }
        wakes_.wait_for(lock, pending_.empty() ? kIdleLookInterval : kLookInterval,
                        [this] { return close_reason_ != nullptr; });
        idle = pending_.empty() ? idle % kIdleLooks + 1 : 0;
        // 2. Move the messages for which no thread waits, and end those that are over.
        const std::vector<Handle> unawaited = unawaited_requests();
        if (unawaited.empty()) continue;
        lock.unlock();
        caught([&] {
            remote_.progress();
            for (const Handle& request : unawaited) end_if_over(request);
        });
        lock.lock();
    }
}

// Under the lock: the pending requests for which no thread waits.
std::vector<UserMessages::Handle> UserMessages::unawaited_requests() const {
    std::vector<Handle> unawaited;
    std::copy_if(pending_.begin(), pending_.end(), std::back_inserter(unawaited),
                 [](const Handle& request) { return !request->is_awaited; });
    return unawaited;
}

// Ends the request if its message is over or late, or the group has ended, unless a thread waits for it.
void UserMessages::end_if_over(const Handle& request) {
    RemotePeers::Handle remote;
    {
        const std::lock_guard lock(mutex_);
        if (close_reason_ || request->is_awaited || !request->remote) return;
        const bool is_late = Clock::now() >= request->remote->deadline || membership_.notice();
        if (!is_late && !RemotePeers::is_done(request->remote)) return;
        request->is_awaited = true;
        remote = request->remote;
    }
    end_with(request, [&] { remote_.wait(remote); });
}

void UserMessages::close(std::exception_ptr reason) {
    Thread thread;
    std::vector<Handle> open;
    {
        const std::lock_guard lock(mutex_);
        if (!close_reason_) close_reason_ = std::move(reason);
        thread = std::move(thread_);
        open = unawaited_requests();  // the threads that wait for the other requests end these
        wakes_.notify_all();
    }
    thread.end();
    for (const Handle& request : open) {
        if (const auto callback = finish(request, close_reason_, false)) caught(callback);
    }
}

}  // namespace dist_prims
