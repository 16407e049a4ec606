#include "lane.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

// A rank that has gone may have sent messages on a connection that is not yet accepted: time for it to appear.
constexpr auto kTimeToAppear = 1s;
constexpr auto kBetweenLooks = 50ms;
constexpr std::chrono::milliseconds kLongestSleep = 1h;
constexpr std::size_t kMuch = 128 << 10;  // bytes to be received; buffers of sockets hold as many

// What an event is about: the eventfd, or the connection to or from a rank.
constexpr std::uint64_t kWake = 0, kTo = std::uint64_t{1} << 32, kFrom = std::uint64_t{2} << 32;

void watch(const Socket& events, int operation, int descriptor, std::uint64_t key, std::uint32_t wanted) {
    epoll_event event{};
    event.events = wanted;
    event.data.u64 = key;
    if (::epoll_ctl(events.descriptor(), operation, descriptor, &event) != 0)
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

// The lock, and what must be freed without it: an owner of memory may run any code.
class TcpLane::Guard {
public:
    explicit Guard(TcpLane& lane) : lane_(lane), lock(lane.mutex_) {}
    ~Guard() {
        const std::vector<TcpMessagePtr> over = lane_.take_ended_and_given_up();
        lock.unlock();
    }
    Guard(const Guard&) = delete;

private:
    TcpLane& lane_;

public:
    std::unique_lock<std::mutex> lock;
};

// Marks a message as awaited by this thread.
class TcpLane::AwaitedScope {
public:
    AwaitedScope(TcpLane& lane, TcpMessage& message) : message_(message), scope_(lane.waiting_, message) {
        message.is_awaited = true;
    }
    ~AwaitedScope() { message_.is_awaited = false; }
    AwaitedScope(const AwaitedScope&) = delete;

private:
    TcpMessage& message_;
    const WaitingThreads<TcpMessage>::Scope scope_;
};

TcpLane::TcpLane(Connect connect, bool polls, OnGone on_gone)
    : connect_(std::move(connect)),
      on_gone_(std::move(on_gone)),
      events_(::epoll_create1(EPOLL_CLOEXEC)),
      polling_(polls) {
    if (events_.descriptor() < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1()");
    watch(events_, EPOLL_CTL_ADD, waiting_.descriptor(), kWake, EPOLLIN);
}

void TcpLane::check_open() const {
    if (!closed_.empty()) throw Transport::TransportError(closed_);
}

void TcpLane::send(const TcpMessagePtr& message) {
    const Guard guard(*this);
    check_open();
    Outgoing* const found = outgoing(message->peer, true);
    if (!found) {
        message->error = gone_.at(message->peer).failure;
        return;
    }
    found->connection.push(message);
    if (!found->is_full) flush(message->peer);
    waiting_.wake_others();
}

void TcpLane::receive(const TcpMessagePtr& message) {
    const Guard guard(*this);
    check_open();
    inbox_.post(message);
    if (message->is_done) return;
    if (const auto ended = ended_.find(message->peer); ended != ended_.end()) inbox_.fail(message->peer, ended->second);
    resume(message->peer);
}

TcpLane::WaitResult TcpLane::wait(TcpMessage& message, std::chrono::milliseconds limit) {
    const auto until = Clock::now() + limit;
    Guard guard(*this);
    if (std::exchange(message.is_aborted, false)) return WaitResult::kAborted;
    const AwaitedScope awaited(*this, message);
    if (!message.is_outgoing) resume(message.peer);
    Polling::Wait polling(polling_);
    while (!message.is_done) {
        if (message.has_other_length) throw Transport::LengthError(message.error.text);
        if (!message.error.empty()) throw_failure(message.error);
        if (message.is_aborted) return WaitResult::kAborted;
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
        if (left <= 0ms) return WaitResult::kLate;
        check_peer(message);
        if (!message.error.empty()) continue;
        const auto sleep = polling.again(guard.lock) ? 0ms : left;
        const bool is_over = message.is_done || message.is_aborted || !message.error.empty();
        if (!is_over && !move(guard.lock, sleep, &message)) return WaitResult::kAborted;
    }
    return WaitResult::kDone;
}

// Makes sure that the end of the rank from which a message is awaited is noticed.
void TcpLane::check_peer(TcpMessage& message) {
    const int peer = message.peer;
    if (message.is_outgoing || peer == Transport::kAnyone || incoming_.count(peer)) return;
    if (!gone_.count(peer)) outgoing(peer, false);
    if (const auto gone = gone_.find(peer); gone != gone_.end() && Clock::now() - gone->second.since > kTimeToAppear)
        message.error = gone->second.failure;
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
    const auto found = outgoing_.find(message->peer);
    if (found == outgoing_.end() || found->second.connection.withdraw(message)) return;
    if (message->owner)
        given_up_.push_back(message);
    else  // the peer then takes this rank for dead; messages without an owner are given up only where the group ends
        end_outgoing(message->peer, {"a message was given up when a part of it had been sent"});
}

// Removes the messages from given_up_ that have been sent or have failed, and returns them. Under the lock.
std::vector<TcpMessagePtr> TcpLane::take_ended_and_given_up() {
    if (given_up_.empty()) return {};
    const auto is_open = [](const TcpMessagePtr& each) { return !each->is_done && each->error.empty(); };
    const auto first = std::stable_partition(given_up_.begin(), given_up_.end(), is_open);
    std::vector<TcpMessagePtr> over(first, given_up_.end());
    given_up_.erase(first, given_up_.end());
    return over;
}

void TcpLane::open(int peer) {
    const std::lock_guard lock(mutex_);
    if (closed_.empty()) outgoing(peer, true);
}

void TcpLane::add(int peer, Socket socket) {
    const std::lock_guard lock(mutex_);
    if (!closed_.empty() || ended_.count(peer) || incoming_.count(peer)) return;  // the socket is closed here
    const int descriptor = socket.descriptor();
    incoming_.emplace(peer, Incoming{IncomingConnection(std::move(socket), peer)});
    watch(events_, EPOLL_CTL_ADD, descriptor, key_of(kFrom, peer), EPOLLIN);
}

void TcpLane::leave(std::chrono::milliseconds limit) {
    const auto until = Clock::now() + limit;
    std::unique_lock lock(mutex_);  // without Guard, which may free memory of Python: the interpreter may be finalized
    if (std::exchange(is_leaving_, true)) return;
    std::vector<int> peers;
    for (auto& [peer, each] : outgoing_) {
        each.connection.push_leave();
        if (!each.is_full) peers.push_back(peer);
    }
    for (const int peer : peers) flush(peer);
    while (has_unsent()) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
        if (left <= 0ms) return;
        move(lock, left);
    }
}

bool TcpLane::has_unsent() const {
    return std::any_of(outgoing_.begin(), outgoing_.end(), [](const auto& each) { return each.second.is_full; });
}

int TcpLane::dead_rank() {
    const std::lock_guard lock(mutex_);
    return dead_rank_;
}

std::string TcpLane::refusal() {
    const std::lock_guard lock(mutex_);
    return refusal_;
}

std::set<int> TcpLane::unanswering() {
    const std::lock_guard lock(mutex_);
    std::set<int> found;
    for (const auto& [peer, each] : outgoing_) {
        if (each.connection.is_unanswered()) found.insert(peer);
    }
    return found;
}

std::map<int, Transport::Delivered> TcpLane::delivered() {
    const std::lock_guard lock(mutex_);
    std::map<int, Transport::Delivered> found;
    for (const auto& [peer, each] : outgoing_) found[peer] = each.connection.delivered();
    return found;
}

void TcpLane::close(const std::string& reason) {
    const Guard guard(*this);
    if (!closed_.empty()) return;
    closed_ = reason;
    inbox_.fail_all({reason});
    for (auto& [peer, each] : outgoing_) each.connection.fail({reason});
    outgoing_.clear();
    incoming_.clear();
    waiting_.wake_others();
}

// The connection to a rank, which is opened if there is none; null if the rank has gone. Without a message, a
// connection for which no descriptor is left can be opened later.
TcpLane::Outgoing* TcpLane::outgoing(int peer, bool has_message) {
    if (gone_.count(peer)) return nullptr;
    if (const auto found = outgoing_.find(peer); found != outgoing_.end()) return &found->second;
    try {
        Outgoing& made = outgoing_.emplace(peer, Outgoing{connect_(peer)}).first->second;
        if (is_leaving_) made.connection.push_leave();
        watch(events_, EPOLL_CTL_ADD, made.connection.descriptor(), key_of(kTo, peer), EPOLLIN | EPOLLOUT);
        made.is_full = true;  // until the connection is established
        return &made;
    } catch (const std::system_error& error) {
        const Failure failure{error.what(), error.code().value()};
        if (failure.is_exhaustion() && !has_message) return nullptr;
        if (failure.is_exhaustion()) refusal_ = failure.text;
        end_outgoing(peer, failure);
        return nullptr;
    }
}

void TcpLane::flush(int peer) {
    Outgoing& found = outgoing_.at(peer);
    found.connection.write();
    if (!found.connection.error().empty()) return end_outgoing(peer, found.connection.error());
    const bool is_full = found.connection.has_unsent();
    if (std::exchange(found.is_full, is_full) != is_full)
        watch(events_, EPOLL_CTL_MOD, found.connection.descriptor(), key_of(kTo, peer),
              is_full ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

void TcpLane::end_outgoing(int peer, const Failure& failure) {
    if (gone_.emplace(peer, Gone{failure, Clock::now()}).second && on_gone_) on_gone_(peer, failure);
    const auto found = outgoing_.find(peer);
    if (found == outgoing_.end()) return;
    found->second.connection.fail(failure);
    outgoing_.erase(found);
}

void TcpLane::read(int peer) {
    Incoming& found = incoming_.at(peer);
    IncomingConnection& connection = found.connection;
    connection.read(inbox_);
    if (!connection.error().empty()) {
        if (!connection.has_left() && dead_rank_ == Transport::kAnyone) dead_rank_ = peer;
        if (ended_.emplace(peer, connection.error()).second && on_gone_) on_gone_(peer, connection.error());
        inbox_.fail(peer, connection.error());
        incoming_.erase(peer);
        return;
    }
    const bool is_watched = !connection.is_stalled();
    if (std::exchange(found.is_watched, is_watched) != is_watched)
        watch(events_, is_watched ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, connection.descriptor(), key_of(kFrom, peer),
              EPOLLIN);
}

// Reads on, if the connection from this rank (kAnyone: from any) has stalled, now that another message is expected.
void TcpLane::resume(int peer) {
    std::vector<int> stalled;
    for (const auto& [from, each] : incoming_) {
        if (!each.is_watched && (peer == Transport::kAnyone || peer == from)) stalled.push_back(from);
    }
    for (const int from : stalled) read(from);
    if (!stalled.empty()) waiting_.wake_others();
}

// Sleeps until something can be moved, and moves it. Returns false if a signal has come.
bool TcpLane::move(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds limit, const TcpMessage* own) {
    std::array<epoll_event, 32> events;
    auto sleep = std::min(limit, kLongestSleep);
    if (!gone_.empty()) sleep = std::min<std::chrono::milliseconds>(sleep, kBetweenLooks);
    lock.unlock();
    const int count = ::epoll_wait(events_.descriptor(), events.data(), events.size(), static_cast<int>(sleep.count()));
    const bool is_interrupted = count < 0 && errno == EINTR;
    lock.lock();
    for (int each = 0; each < count; ++each) handle(events[static_cast<std::size_t>(each)]);
    waiting_.wake_others(own);
    return !is_interrupted;
}

void TcpLane::progress() {
    Guard guard(*this);
    move(guard.lock, 0ms);
}

void TcpLane::handle(const epoll_event& event) {
    const int peer = static_cast<int>(event.data.u64 & 0xffffffff);
    const std::uint64_t direction = event.data.u64 - static_cast<std::uint32_t>(peer);
    if (direction == kFrom) {
        if (const auto found = incoming_.find(peer); found != incoming_.end() && found->second.is_watched) read(peer);
    } else if (direction == kTo && outgoing_.count(peer)) {
        if (event.events & (EPOLLOUT | EPOLLERR)) flush(peer);
        const auto found = outgoing_.find(peer);
        if (found == outgoing_.end() || !(event.events & (EPOLLIN | EPOLLHUP))) return;
        found->second.connection.look_for_end();
        if (!found->second.connection.error().empty()) end_outgoing(peer, found->second.connection.error());
    }
}

bool TcpLane::is_loaded() {
    const std::lock_guard lock(mutex_);
    return inbox_.expected_bytes() > kMuch || has_unsent();
}

bool TcpLane::is_idle_since(std::uint64_t& waits) {
    const std::lock_guard lock(mutex_);
    return waiting_.is_none_since(waits);
}

}  // namespace dist_prims
