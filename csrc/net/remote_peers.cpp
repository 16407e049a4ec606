// A message is posted by send() or receive(), and ends in wait_until_deadline(). A failure is reported by one function
// for each kind: the group has ended (check_failures), the message is late (throw_late), the transport has failed the
// message (throw_broken), or its length was wrong (throw_mismatch_of_length). The first three look for a notice first,
// because the rank that ended the group knows the cause. end() passes a notice of this rank on to the others.
#include "remote_peers.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "../common/thread.h"

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr auto kTimeToSend = 100ms, kTimeToReceive = 300ms;  // of notices
constexpr auto kTick = 50ms;                                 // the ticker aborts waits that are older
constexpr int kIdleTicks = 20;                               // without a wait; then the ticker sleeps
constexpr auto kBetweenLooks = 1ms;
constexpr auto kMomentToFinish = 500ms;  // a rank that has died may have completed its part of the call
// A transport that times out closes all connections, so this rank must time out first.
constexpr auto kTransportMargin = 1min;

// All ranks of the group but this one: the remote ranks, and the others of this host.
std::vector<int> all_others(const Membership& membership, std::vector<int> ranks) {
    for (int peer = 0; peer < membership.size(); ++peer) {
        if (peer != membership.rank()) ranks.push_back(membership.group_rank(peer));
    }
    return ranks;
}

// Runs `act`, and ignores a TransportError. Returns any other exception: in a wait of the transport a signal handler
// may throw one, such as a KeyboardInterrupt.
template <typename Act>
std::exception_ptr interrupt_of(const Act& act) {
    return caught([&] {
        try {
            act();
        } catch (const Transport::TransportError&) {  // the other side is gone
        }
    });
}

}  // namespace

RemotePeers::RemotePeers(std::unique_ptr<Transport> transport, Membership& membership,
                         const std::vector<int>& remote_ranks)
    : tags(transport->largest_tag()),
      membership_(membership),
      remote_ranks_(remote_ranks),
      transport_(std::move(transport)),
      notice_request_(transport_->receive(Transport::kAnyone, tags.notice(),
                                          reinterpret_cast<std::byte*>(&received_notice_), sizeof(received_notice_))),
      has_exchanged_(remote_ranks.size() + static_cast<std::size_t>(membership.size())),
      diagnosis_(std::make_shared<TimeoutDiagnosis>(
          *transport_, tags.diagnosis(), membership.group_rank(membership.rank()), all_others(membership, remote_ranks),
          [this](const auto& notice) { on_notice(notice); })) {
    membership_.on_awaited([diagnosis = diagnosis_](int awaited) { diagnosis->answer(awaited); });
}

RemotePeers::~RemotePeers() {
    {
        const std::lock_guard lock(mutex_);
        is_closing_ = true;
        ticker_wakes_.notify_all();
    }
    if (ticker_.joinable()) ticker_.join();
    diagnosis_->close();
}

// Aborts long waits at intervals, so that they check for failures. Sleeps after a time without waits: waking this
// thread for each short wait would cost more than the wait.
void RemotePeers::run_ticker() {
    std::unique_lock lock(mutex_);
    for (int idle = 0; !is_closing_;) {
        if (idle == kIdleTicks) {
            is_asleep_ = true;
            while (!is_closing_ && is_asleep_) wait_for_notification(ticker_wakes_, lock);
        }
        const auto waits_before = active_waits_;
        ticker_wakes_.wait_for(lock, kTick, [this] { return is_closing_; });
        for (Transport::TransportRequest* request : active_waits_) {
            if (waits_before.count(request)) request->abort();
        }
        idle = active_waits_.empty() ? idle % kIdleTicks + 1 : 0;  // 1 after the ticker has slept
    }
}

void RemotePeers::on_notice(const std::optional<Membership::Notice>& notice) {
    if (notice) membership_.give_notice(*notice);
    wake();
}

void RemotePeers::wake() {
    const std::lock_guard lock(mutex_);
    for (Transport::TransportRequest* request : active_waits_) request->abort();
}

template <typename Post>
RemotePeers::Handle RemotePeers::post(RemoteRequest request, const Post& post_to_transport) {
    if (request.peer != Transport::kAnyone) {
        auto& has_exchanged = has_exchanged_[static_cast<std::size_t>(request.peer)];
        if (!has_exchanged.load(std::memory_order_relaxed)) has_exchanged.store(true, std::memory_order_relaxed);
    }
    request.deadline = Clock::now() + request.timeout;
    std::optional<MessageFailure> failure;
    try {
        request.handle = post_to_transport();
        return std::make_shared<RemoteRequest>(std::move(request));
    } catch (const Transport::TransportError& error) {
        failure.emplace(error);
    }
    throw_broken(request, *failure);
}

RemotePeers::Handle RemotePeers::send(int to, int tag, const std::byte* data, std::size_t bytes,
                                      std::chrono::milliseconds timeout, Transport::Owner owner) {
    return post({nullptr, to, tag, true, bytes, timeout, {}},
                [&] { return transport_->send(to, tag, data, bytes, std::move(owner)); });
}

RemotePeers::Handle RemotePeers::receive(int from, int tag, std::byte* data, std::size_t bytes,
                                         std::chrono::milliseconds timeout, Transport::Owner owner) {
    return post({nullptr, from, tag, false, bytes, timeout, {}},
                [&] { return transport_->receive(from, tag, data, bytes, std::move(owner)); });
}

RemotePeers::Handle RemotePeers::receive_from_any(int tag, std::byte* data, std::size_t bytes,
                                                  std::chrono::milliseconds timeout, Transport::Owner owner,
                                                  const ClaimPtr& claim) {
    return post({nullptr, Transport::kAnyone, tag, false, bytes, timeout, {}},
                [&] { return transport_->receive_from_any(tag, data, bytes, std::move(owner), claim); });
}

void RemotePeers::wait(const Handle& request) {
    if (!wait_until_deadline(request)) throw_late(*request);
}

bool RemotePeers::wait_until_deadline(const Handle& request) {
    const TraceSpan span(TraceKind::kWait, request->bytes, request->peer);
    for (bool is_due = false;;) {
        // 1. Wait until the message is done, or the ticker or a notice aborts the wait.
        std::optional<MessageFailure> failure;
        try {
            if (wait_until_abort(*request)) {
                if (request->peer == Transport::kAnyone) request->peer = request->handle->source();
                request->trace.end(request->outgoing, request->peer, request->bytes);
                if (tags.is_collective(request->tag)) slow_call_.look(*transport_, membership_);
                return true;
            }
        } catch (const Transport::LengthError& error) {
            throw_mismatch_of_length(*request, error.what());
        } catch (const Transport::TransportError& error) {
            failure.emplace(error);
        } catch (...) {  // a signal handler has thrown, such as a KeyboardInterrupt
            membership_.give_notice({CommError::Kind::kInterrupted, membership_.group_rank(membership_.rank())});
            throw;
        }
        if (failure) throw_broken(*request, *failure);
        // 2. The wait was aborted: look for failures of other ranks.
        check_failures(*request);
        // 3. At the deadline wait once more. If this rank was stopped for a time, its message may have arrived, and an
        // aborted wait does not report that.
        if (Clock::now() >= request->deadline && std::exchange(is_due, true)) return false;
    }
}

bool RemotePeers::is_done_after_deadline(const Handle& request) {
    progress();
    if (!is_done(request)) return false;
    wait(request);
    return true;
}

void RemotePeers::wait(const Handle& request, std::chrono::milliseconds timeout, Clock::time_point since) {
    request->timeout = timeout;
    request->deadline = since + timeout;
    wait(request);
}

void RemotePeers::check(const Handle& request) {
    check_failures(*request);
    if (Clock::now() >= request->deadline) throw_late(*request);
}

// Waits until the message is done (true), or the wait is aborted (false).
bool RemotePeers::wait_until_abort(RemoteRequest& request) {
    // Registers a wait that may take time, so that wake() and the ticker can abort it. Starts or wakes the ticker.
    struct ActiveWait {
        RemotePeers& remote;
        Transport::TransportRequest* request;
        ActiveWait(RemotePeers& remote, Transport::TransportRequest* request) : remote(remote), request(request) {
            const std::lock_guard lock(remote.mutex_);
            if (!remote.ticker_.joinable())
                remote.ticker_ =
                    start_thread(remote.membership_.own_name() + ": the thread that limits waits for other hosts",
                                 [&remote] { remote.run_ticker(); });
            if (std::exchange(remote.is_asleep_, false)) remote.ticker_wakes_.notify_all();
            remote.active_waits_.insert(request);
        }
        ~ActiveWait() {
            const std::lock_guard lock(remote.mutex_);
            remote.active_waits_.erase(request);
        }
        ActiveWait(const ActiveWait&) = delete;
    };
    std::optional<ActiveWait> active_wait;
    if (!request.handle->is_done()) active_wait.emplace(*this, request.handle.get());
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(request.deadline - Clock::now());
    return request.handle->wait(std::max(left, 0ms) + kTransportMargin);
}

// Whether there is a notice: of this host, or from another host, which then becomes known on this one.
bool RemotePeers::look_for_notice() {
    if (!membership_.notice() && notice_request_->is_done()) receive_notice(1ms);
    return membership_.notice().has_value();
}

// Called at intervals by the thread that waits for the request. Throws if the group has ended, or must end.
void RemotePeers::check_failures(const RemoteRequest& request) {
    look_for_notice();  // the last line throws it
    throw_if_exhausted(false, [&] { return text(request, ""); });
    if (tags.is_collective(request.tag)) slow_call_.look(*transport_, membership_);
    if (request.peer != Transport::kAnyone) diagnosis_->answer(request.peer);
    // Has a rank of this host died, or any rank if the message may come from any rank? If the rank of a message from
    // one remote rank dies, the transport fails the message.
    Membership::Notice notice{CommError::Kind::kPeerDied, membership_.dead_rank()};
    if (notice.culprit < 0 && request.peer == Transport::kAnyone) {
        const Transport::FailedPeer failed = transport_->failed_peer();
        notice.culprit = failed.rank;
        if (failed.is_unreachable)
            notice = {CommError::Kind::kUnreachable, failed.rank, membership_.group_rank(membership_.rank())};
    }
    if (notice.culprit >= 0 && !membership_.notice()) {
        const std::lock_guard lock(mutex_);
        const auto now = Clock::now();
        if (failure_seen_ == Clock::time_point{}) failure_seen_ = now;
        if (now - failure_seen_ > kMomentToFinish) throw_failure(notice, [&] { return text(request, ""); });
    }
    // Throw the notice, if there is one. This wait is for no rank of this host.
    membership_.check_failures([](int) { return false; }, [&] { return text(request, ""); });
}

void RemotePeers::throw_mismatch_of_length(const RemoteRequest& request, const std::string& reason) {
    throw CommError(CommError::Kind::kMismatch,
                    membership_.own_name() + ": " + reason + ", " + text(request) +
                        "; what is sent and the tensor that receives it must be of one size");
}

void RemotePeers::throw_late(const RemoteRequest& request) {
    if (request.peer == Transport::kAnyone)
        membership_.throw_timeout(std::to_string(request.timeout.count()) + " ms in " + text(request));
    throw_late(request.peer, [&] { return text(request, ""); });
}

void RemotePeers::throw_late(int awaited, const Membership::What& what) {
    const Membership::Notice cause = diagnosis_->diagnose(awaited, [this] { return look_for_notice(); });
    throw_if_exhausted(true, what);  // then this rank may have missed replies
    throw_failure(cause, what);
}

// Throws if this rank has no descriptor or port left. `now`: see Transport::refusal().
void RemotePeers::throw_if_exhausted(bool now, const Membership::What& what) {
    const std::string refusal = transport_->refusal(now);
    if (refusal.empty() || membership_.notice()) return;
    throw_failure({CommError::Kind::kExhausted, membership_.group_rank(membership_.rank())},
                  [&] { return what() + " (" + refusal + ")"; });
}

RemotePeers::MessageFailure::MessageFailure(const Transport::TransportError& error)
    : kind(dynamic_cast<const Transport::UnreachableError*>(&error) ? CommError::Kind::kUnreachable
           : dynamic_cast<const Transport::ExhaustedError*>(&error) ? CommError::Kind::kExhausted
                                                                    : CommError::Kind::kPeerDied),
      reason(error.what()) {}

// The transport has failed the message. Without a notice its peer is the culprit, or this rank if it is exhausted.
void RemotePeers::throw_broken(const RemoteRequest& request, const MessageFailure& failure) {
    if (!membership_.notice()) receive_notice(kTimeToReceive);
    const int peer = request.peer == Transport::kAnyone && request.handle ? request.handle->source() : request.peer;
    const auto what = [&] { return text(request, failure.reason); };
    const int me = membership_.group_rank(membership_.rank());
    if (failure.kind == CommError::Kind::kExhausted) throw_failure({failure.kind, me}, what);
    if (peer == Transport::kAnyone)  // a transport fails a receive from any rank only when the transport closes
        throw_failure({CommError::Kind::kInterrupted, me}, what);
    throw_failure({failure.kind, peer, failure.kind == CommError::Kind::kUnreachable ? me : -1}, what);
}

std::vector<TimeoutDiagnosis::Link> RemotePeers::cut_links() {
    auto links = diagnosis_->cut_links();
    const auto notice = membership_.notice();
    if (notice && notice->kind == CommError::Kind::kUnreachable) links.push_back({notice->culprit, notice->other});
    return links;
}

// Ends the group with this notice, and throws the first notice: this one, or another rank's that was given earlier.
void RemotePeers::throw_failure(const Membership::Notice& notice, const Membership::What& what) {
    if (membership_.give_notice(notice)) membership_.throw_failure(notice, what);
    membership_.check_abort(what);
    std::abort();  // not reached: there is a notice, so check_abort() has thrown
}

// Waits for the notice that another rank may have sent before it went, but not for longer than `limit`. Polls, because
// a wait of the transport beyond its limit closes all connections, and then this rank could not send a notice itself.
void RemotePeers::receive_notice(std::chrono::milliseconds limit) {
    const auto until = Clock::now() + limit;
    while (!notice_request_->is_done()) {
        if (Clock::now() >= until) return;
        std::this_thread::sleep_for(kBetweenLooks);
    }
    try {
        if (!notice_request_->wait(limit)) return;
        const auto& [kind, culprit, other] = received_notice_;
        const Membership::Notice notice{static_cast<CommError::Kind>(kind), culprit, other};
        membership_.give_notice(diagnosis_->corrected(notice, notice_request_->source()));
    } catch (const Transport::TransportError&) {  // no notice will come
    }
}

void RemotePeers::end() {
    {
        const std::lock_guard lock(mutex_);
        if (std::exchange(has_ended_, true)) return;
    }
    // 1. If there is no notice yet, this rank has interrupted the group. Send the notice to the other hosts.
    membership_.give_notice({CommError::Kind::kInterrupted, membership_.group_rank(membership_.rank())});
    const auto interrupt_in_send = interrupt_of([this] { send_notice(); });
    // 2. Close the transport. A wait beyond its limit closes it, so wait for a message that no rank sends. The receive
    // names no rank: a receive from a rank that has gone fails at once, and closes nothing. A signal ends a wait early.
    const auto interrupt_in_close = interrupt_of([this] {
        const auto nothing = std::make_shared<std::byte>();
        const auto request = transport_->receive(Transport::kAnyone, tags.unused(), nothing.get(), 1, nothing);
        int attempts = 20;
        while (!request->wait(1ms) && --attempts > 0) continue;
    });
    // 3. Only now, when no message uses memory any more, throw what a signal handler has thrown.
    for (const auto& interrupt : {interrupt_in_send, interrupt_in_close}) {
        if (interrupt) std::rethrow_exception(interrupt);
    }
}

void RemotePeers::leave() {
    if (!membership_.notice() && !has_left_.exchange(true)) transport_->leave();
}

// Sends the notice twice. The TimeoutDiagnosis thread of a successor wakes up at once, but may be busy with other
// messages. So the notice also goes to the receive that each rank has posted from the beginning. A rank that waits for
// this one, and has exchanged messages with it, then has the notice before this rank closes its connections.
void RemotePeers::send_notice() {
    const auto notice = membership_.notice();
    diagnosis_->send_notice(*notice);
    const auto message = std::make_shared<const NoticeMessage>(
        NoticeMessage{static_cast<std::int32_t>(notice->kind), notice->culprit, notice->other});
    std::vector<Transport::Handle> requests;
    for (const int other : remote_ranks_) {
        if (!has_exchanged_[static_cast<std::size_t>(other)] && !diagnosis_->is_successor(other)) continue;
        try {
            const auto* data = reinterpret_cast<const std::byte*>(message.get());
            requests.push_back(transport_->send(other, tags.notice(), data, sizeof(NoticeMessage), message));
        } catch (const Transport::TransportError&) {  // the other rank has gone
        }
    }
    const auto until = Clock::now() + kTimeToSend;
    for (const auto& request : requests) {
        try {
            const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
            request->wait(std::max(left, 1ms));
        } catch (const Transport::TransportError&) {
        }
    }
}

// The request in an error message, such as "recv(4 bytes from rank 1, tag 0)", after the call that it belongs to.
std::string RemotePeers::text(const RemoteRequest& request) const {
    const std::string peer = request.peer == Transport::kAnyone ? "any rank" : membership_.title(request.peer);
    const std::string tag = request.tag > tags.largest_of_users() ? "" : ", tag " + std::to_string(request.tag);
    const std::string call = request.tag == tags.barrier()     ? "monitored_barrier: "
                             : tags.is_collective(request.tag) ? slow_call_.call().text() + ": "
                                                               : "";
    return call + (request.outgoing ? "send(" : "recv(") + std::to_string(request.bytes) + " bytes " +
           (request.outgoing ? "to " : "from ") + peer + tag + ")";
}

// The request with its timeout, and the reason of the failure unless it is empty.
std::string RemotePeers::text(const RemoteRequest& request, const std::string& reason) const {
    return text(request) + " within " + std::to_string(request.timeout.count()) + " ms" +
           (reason.empty() ? "" : " (" + reason.substr(0, 200) + ")");
}

}  // namespace dist_prims
