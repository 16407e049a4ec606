// The functions of TcpLane, in three parts: the calls for one message (send() to release()), the calls for connections
// (open() to close()), and from outgoing() on the functions that connect, read and write. Any thread may call a public
// function, which takes the lock; private functions are called under the lock.
#include "lane.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

// A rank that has gone may have sent messages on a connection that is not accepted yet. So a receive from it fails only
// this time after the connection to it has ended.
constexpr auto kTimeToAppear = 1s;
constexpr auto kBetweenLooks = 50ms;  // whether kTimeToAppear is over
constexpr std::chrono::milliseconds kLongestSleep = 1h;
constexpr unsigned kPollsToMoveAll = 16;         // one of so many polls reads all connections at once
constexpr std::size_t kLoadedBytes = 128 << 10;  // the buffers of a socket hold as many

// The key of an event of epoll: the eventfd of waiting_, or a direction plus the rank of the peer.
constexpr std::uint64_t kWake = 0, kTo = std::uint64_t{1} << 32, kFrom = std::uint64_t{2} << 32;

void watch(const Socket& epoll, int operation, int descriptor, std::uint64_t key, std::uint32_t kinds) {
    epoll_event event{};
    event.events = kinds;
    event.data.u64 = key;
    if (::epoll_ctl(epoll.descriptor(), operation, descriptor, &event) != 0)
        throw std::system_error(errno, std::generic_category(), "epoll_ctl()");
}

[[noreturn]] void throw_failure(const Failure& failure) {
    if (failure.is_unreachable()) throw Transport::UnreachableError(failure.text);
    if (failure.is_exhaustion()) throw Transport::ExhaustedError(failure.text);
    throw Transport::TransportError(failure.text);
}

std::uint64_t key_of(std::uint64_t direction, int peer) {
    return direction | static_cast<std::uint32_t>(peer);
}

}  // namespace

// Holds the lock, and then frees without the lock the messages that nothing uses any more: the owner of a message's
// memory may run any code when it is destroyed.
class TcpLane::LockAndFree {
public:
    explicit LockAndFree(TcpLane& lane) : lane_(lane), lock(lane.mutex_) {}
    ~LockAndFree() {
        const std::vector<TcpMessagePtr> freed_without_lock = lane_.take_finished();
        lock.unlock();
    }
    LockAndFree(const LockAndFree&) = delete;

private:
    TcpLane& lane_;

public:
    std::unique_lock<std::mutex> lock;
};

TcpLane::TcpLane(Connect connect, bool polls, OnGone on_gone)
    : connect_(std::move(connect)),
      on_gone_(std::move(on_gone)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      polling_(polls) {
    if (epoll_.descriptor() < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1()");
    watch(epoll_, EPOLL_CTL_ADD, waiting_.descriptor(), kWake, EPOLLIN);
}

void TcpLane::check_open() const {
    if (!close_reason_.empty()) throw Transport::TransportError(close_reason_);
}

void TcpLane::send(const TcpMessagePtr& message) {
    const LockAndFree guard(*this);
    check_open();
    Outgoing* const to = outgoing(message->peer, true);
    if (!to) {
        message->error = ended_outgoing_.at(message->peer).failure;
        return;
    }
    to->connection.push(message);
    if (!to->is_full) write_to(message->peer);
    waiting_.wake_others();
}

void TcpLane::receive(const TcpMessagePtr& message) {
    const LockAndFree guard(*this);
    check_open();
    inbox_.post(message);
    if (message->is_done) return;
    if (const auto ended = ended_incoming_.find(message->peer); ended != ended_incoming_.end())
        inbox_.fail(message->peer, ended->second);
    read_stalled(message->peer);
}

TcpLane::WaitResult TcpLane::wait(TcpMessage& message, std::chrono::milliseconds limit) {
    const auto until = Clock::now() + limit;
    LockAndFree guard(*this);
    if (std::exchange(message.is_aborted, false)) return WaitResult::kAborted;
    const WaitingThreads<TcpMessage>::Scope awaited(waiting_, message);
    if (!message.is_outgoing) read_stalled(message.peer);
    Polling::Wait polling(polling_);
    while (!message.is_done) {
        // 1. Return if the wait has ended otherwise.
        if (message.has_other_length) throw Transport::LengthError(message.error.text);
        if (!message.error.empty()) throw_failure(message.error);
        if (message.is_aborted) return WaitResult::kAborted;
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
        if (left <= 0ms) return WaitResult::kLate;
        check_sender(message);
        if (!message.error.empty()) continue;
        // 2. Move messages: at once if this wait still polls, else after a sleep. again() unlocks, so another thread
        // may have ended the wait meanwhile. A poll reads the connection of the awaited message first, and the others
        // only if that does not complete it. Some polls read all at once: many short waits would move nothing else.
        const auto sleep = polling.again(guard.lock) ? 0ms : left;
        if (sleep > 0ms)
            read_where([](int, const Incoming& from) { return from.connection.has_unread_trailer(); });
        else if (!message.is_outgoing && ++polls_ % kPollsToMoveAll != 0)
            read_awaited(message.peer);
        const bool is_over = message.is_done || message.is_aborted || !message.error.empty();
        if (!is_over && !sleep_and_move(guard.lock, sleep, &message)) return WaitResult::kAborted;
    }
    return WaitResult::kDone;
}

// Makes sure that this rank notices the end of the rank from which a message is awaited: opens a connection to it if it
// has not connected to this rank. Fails the message if the connection to it has ended.
void TcpLane::check_sender(TcpMessage& message) {
    const int peer = message.peer;
    if (message.is_outgoing || peer == Transport::kAnyone || incoming_.count(peer)) return;
    if (!ended_outgoing_.count(peer)) outgoing(peer, false);
    const auto ended = ended_outgoing_.find(peer);
    if (ended != ended_outgoing_.end() && Clock::now() - ended->second.ended_at > kTimeToAppear)
        message.error = ended->second.failure;
}

bool TcpLane::is_done(const TcpMessage& message) {
    const std::lock_guard lock(mutex_);
    return message.is_done || !message.error.empty();
}

int TcpLane::source(const TcpMessage& message) {
    const std::lock_guard lock(mutex_);
    return message.peer;
}

void TcpLane::abort(TcpMessage& message) {
    const std::lock_guard lock(mutex_);
    message.is_aborted = true;
    waiting_.wake_others();
}

void TcpLane::release(const TcpMessagePtr& message) {
    const std::lock_guard lock(mutex_);
    if (message->is_done || !message->error.empty()) return;
    if (!message->is_outgoing) return inbox_.withdraw(message);
    const auto to = outgoing_.find(message->peer);
    if (to == outgoing_.end() || to->second.connection.withdraw(message)) return;
    // A part of the message has been sent, and the rest must follow. If no owner keeps the memory, the connection ends,
    // and the peer regards this rank as dead. A message without an owner comes here only when the group has ended.
    if (message->owner)
        given_up_.push_back(message);
    else
        end_outgoing(message->peer, {"a message was given up when a part of it had been sent"});
}

// Removes the messages from given_up_ that have been sent or have failed, and returns them.
std::vector<TcpMessagePtr> TcpLane::take_finished() {
    const auto is_open = [](const TcpMessagePtr& message) { return !message->is_done && message->error.empty(); };
    const auto first = std::stable_partition(given_up_.begin(), given_up_.end(), is_open);
    std::vector<TcpMessagePtr> finished(first, given_up_.end());
    given_up_.erase(first, given_up_.end());
    return finished;
}

void TcpLane::open(int peer) {
    const std::lock_guard lock(mutex_);
    if (close_reason_.empty()) outgoing(peer, true);
}

void TcpLane::add(int peer, Socket socket) {
    const std::lock_guard lock(mutex_);
    if (!close_reason_.empty() || ended_incoming_.count(peer) || incoming_.count(peer))
        return;  // the socket is closed here
    const int descriptor = socket.descriptor();
    incoming_.emplace(peer, Incoming{IncomingConnection(std::move(socket), peer)});
    watch(epoll_, EPOLL_CTL_ADD, descriptor, key_of(kFrom, peer), EPOLLIN);
}

void TcpLane::leave(std::chrono::milliseconds limit) {
    const auto until = Clock::now() + limit;
    std::unique_lock lock(mutex_);  // LockAndFree might free memory of Python, whose interpreter may be finalized
    if (std::exchange(is_leaving_, true)) return;
    std::vector<int> writable;  // write_to() may erase from outgoing_
    for (auto& [peer, to] : outgoing_) {
        to.connection.push_leave();
        if (!to.is_full) writable.push_back(peer);
    }
    for (const int peer : writable) write_to(peer);
    while (has_unsent()) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
        if (left <= 0ms) return;
        sleep_and_move(lock, left);
    }
}

bool TcpLane::has_unsent() const {
    return std::any_of(outgoing_.begin(), outgoing_.end(), [](const auto& each) { return each.second.is_full; });
}

Transport::FailedPeer TcpLane::failed_peer() {
    const std::lock_guard lock(mutex_);
    return failed_peer_;
}

std::string TcpLane::refusal() {
    const std::lock_guard lock(mutex_);
    return refusal_;
}

std::set<int> TcpLane::unanswering() {
    const std::lock_guard lock(mutex_);
    std::set<int> peers;
    for (const auto& [peer, to] : outgoing_) {
        if (to.connection.is_unanswered()) peers.insert(peer);
    }
    return peers;
}

std::map<int, Transport::Delivered> TcpLane::delivered() {
    const std::lock_guard lock(mutex_);
    std::map<int, Transport::Delivered> delivered;
    for (const auto& [peer, to] : outgoing_) delivered[peer] = to.connection.delivered();
    return delivered;
}

void TcpLane::close(const std::string& reason) {
    const LockAndFree guard(*this);
    if (!close_reason_.empty()) return;
    close_reason_ = reason;
    inbox_.fail(Transport::kAnyone, {reason});
    for (auto& [peer, to] : outgoing_) to.connection.fail({reason});
    outgoing_.clear();
    incoming_.clear();
    waiting_.wake_others();
}

// Returns the connection to a rank, which is opened if there is none; null if it has ended or cannot be opened. Then it
// is in ended_outgoing_, and is not opened again. The exception: if this rank has no descriptor or port left, and there
// is no message to send, a later call tries again.
TcpLane::Outgoing* TcpLane::outgoing(int peer, bool has_message) {
    if (ended_outgoing_.count(peer)) return nullptr;
    if (const auto known = outgoing_.find(peer); known != outgoing_.end()) return &known->second;
    try {
        Outgoing& opened = outgoing_.emplace(peer, Outgoing{connect_(peer)}).first->second;
        if (is_leaving_) opened.connection.push_leave();
        watch(epoll_, EPOLL_CTL_ADD, opened.connection.descriptor(), key_of(kTo, peer), EPOLLIN | EPOLLOUT);
        opened.is_full = true;  // until the connection is established
        return &opened;
    } catch (const std::system_error& error) {
        const Failure failure{error.what(), error.code().value()};
        if (failure.is_exhaustion() && !has_message) return nullptr;
        if (failure.is_exhaustion()) refusal_ = failure.text;
        end_outgoing(peer, failure);
        return nullptr;
    }
}

// Writes what the kernel takes. epoll watches for space if the kernel's buffer is then full.
void TcpLane::write_to(int peer) {
    Outgoing& to = outgoing_.at(peer);
    to.connection.write();
    if (!to.connection.error().empty()) return end_outgoing(peer, to.connection.error());
    const bool is_full = to.connection.has_unsent();
    if (std::exchange(to.is_full, is_full) != is_full)
        watch(epoll_, EPOLL_CTL_MOD, to.connection.descriptor(), key_of(kTo, peer),
              is_full ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

void TcpLane::end_outgoing(int peer, const Failure& failure) {
    if (ended_outgoing_.emplace(peer, EndedConnection{failure, Clock::now()}).second && on_gone_)
        on_gone_(peer, failure);
    const auto to = outgoing_.find(peer);
    if (to == outgoing_.end()) return;
    to->second.connection.fail(failure);
    outgoing_.erase(to);
}

// `may_leave_trailer`: see IncomingConnection::read().
void TcpLane::read_from(int peer, bool may_leave_trailer) {
    Incoming& from = incoming_.at(peer);
    IncomingConnection& connection = from.connection;
    connection.read(inbox_, may_leave_trailer);
    // 1. The connection has ended: receives from the peer fail.
    if (!connection.error().empty()) {
        if (!connection.has_left() && failed_peer_.rank == Transport::kAnyone)
            failed_peer_ = {peer, connection.error().is_unreachable()};
        if (ended_incoming_.emplace(peer, connection.error()).second && on_gone_) on_gone_(peer, connection.error());
        inbox_.fail(peer, connection.error());
        incoming_.erase(peer);
        return;
    }
    // 2. A stalled connection stays readable, so epoll must not watch it.
    const bool is_watched = !connection.is_stalled();
    if (std::exchange(from.is_watched, is_watched) != is_watched)
        watch(epoll_, is_watched ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, connection.descriptor(), key_of(kFrom, peer),
              EPOLLIN);
}

// Continues to read the connection from this rank (kAnyone: the connections from all ranks) if it has stalled: another
// receive has been posted or is awaited.
void TcpLane::read_stalled(int peer) {
    read_where([peer](int sender, const Incoming& from) {
        return !from.is_watched && (peer == Transport::kAnyone || peer == sender);
    });
}

// Reads the connection from this rank, if there is one and it has not stalled.
void TcpLane::read_awaited(int peer) {
    const auto from = incoming_.find(peer);
    if (from != incoming_.end() && from->second.is_watched) read_from(peer, true);
}

// Reads the connections for which `condition` holds. read_from() may erase from incoming_.
template <typename Condition>
void TcpLane::read_where(const Condition& condition) {
    std::vector<int> senders;
    for (const auto& [sender, from] : incoming_) {
        if (condition(sender, from)) senders.push_back(sender);
    }
    for (const int sender : senders) read_from(sender, false);
    if (!senders.empty()) waiting_.wake_others();
}

// Sleeps until a connection is readable or writable, at most for `limit`, and moves messages. Wakes the threads whose
// waits are over, but for the calling one, which waits for `own`. Returns false if a signal has come.
bool TcpLane::sleep_and_move(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds limit,
                             const TcpMessage* own) {
    std::array<epoll_event, 32> events;
    auto sleep = std::min(limit, kLongestSleep);
    if (!ended_outgoing_.empty()) sleep = std::min<std::chrono::milliseconds>(sleep, kBetweenLooks);
    lock.unlock();
    const int count = ::epoll_wait(epoll_.descriptor(), events.data(), events.size(), static_cast<int>(sleep.count()));
    const bool is_interrupted = count < 0 && errno == EINTR;
    lock.lock();
    const bool polls = own && limit == 0ms;  // the calling thread polls again, or calls read_where() before it sleeps
    for (int index = 0; index < count; ++index) handle_event(events[static_cast<std::size_t>(index)], polls);
    waiting_.wake_others(own);
    return !is_interrupted;
}

void TcpLane::progress() {
    LockAndFree guard(*this);
    sleep_and_move(guard.lock, 0ms);
}

// An earlier event may have ended the connection that an event is about.
void TcpLane::handle_event(const epoll_event& event, bool may_leave_trailer) {
    const int peer = static_cast<int>(event.data.u64 & 0xffffffff);
    const std::uint64_t direction = event.data.u64 - static_cast<std::uint32_t>(peer);
    if (direction == kFrom) {
        if (const auto from = incoming_.find(peer); from != incoming_.end() && from->second.is_watched)
            read_from(peer, may_leave_trailer);
    } else if (direction == kTo && outgoing_.count(peer)) {
        if (event.events & (EPOLLOUT | EPOLLERR)) write_to(peer);
        const auto to = outgoing_.find(peer);
        if (to == outgoing_.end() || !(event.events & (EPOLLIN | EPOLLHUP))) return;
        to->second.connection.look_for_end();
        if (!to->second.connection.error().empty()) end_outgoing(peer, to->second.connection.error());
    }
}

bool TcpLane::is_loaded() {
    const std::lock_guard lock(mutex_);
    return inbox_.expected_bytes() > kLoadedBytes || has_unsent();
}

bool TcpLane::is_idle_since(std::uint64_t& waits) {
    const std::lock_guard lock(mutex_);
    return waiting_.is_none_since(waits);
}

}  // namespace dist_prims
