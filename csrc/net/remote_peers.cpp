#include "remote_peers.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "../common/thread.h"

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr auto kTimeToSend = 100ms, kTimeToReceive = 300ms;
constexpr auto kTick = 50ms;
constexpr int kIdleTicks = 20;
constexpr auto kBetweenLooks = 1ms;
constexpr auto kMomentToFinish = 500ms;  // a rank that has died may have completed its part
constexpr auto kTransportMargin =
    1min;  // a transport that times out closes all connections, so this rank must time out first

// All ranks of the group but this one.
std::vector<int> others(const Membership& membership, std::vector<int> remote_ranks) {
    for (int peer = 0; peer < membership.size(); ++peer) {
        if (peer != membership.rank()) remote_ranks.push_back(membership.group_rank(peer));
    }
    return remote_ranks;
}

// Runs `act`, which may fail with a TransportError, and returns what a signal handler throws in a wait of the
// transport.
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
      diagnosis_(std::make_shared<TimeoutDiagnosis>(
          *transport_, tags.diagnosis(), membership.group_rank(membership.rank()), others(membership, remote_ranks),
          [this](const auto& notice) { on_notice(notice); })) {
    membership_.on_awaited([diagnosis = diagnosis_](int awaited) { diagnosis->answer(awaited); });
}

RemotePeers::~RemotePeers() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
        wakes_.notify_all();
    }
    if (ticker_.joinable()) ticker_.join();
    diagnosis_->close();
}

// Aborts long waits at intervals, so that they check for failures. Sleeps after a time without waits: waking this
// thread for each short wait would cost more than the wait.
void RemotePeers::run_ticker() {
    std::unique_lock lock(mutex_);
    for (int idle = 0; !closing_;) {
        if (idle == kIdleTicks) {
            asleep_ = true;
            while (!closing_ && asleep_) wait_for_notification(wakes_, lock);
        }
        const auto before = waiting_;
        wakes_.wait_for(lock, kTick, [this] { return closing_; });
        for (Transport::TransportRequest* request : waiting_) {
            if (before.count(request)) request->abort();
        }
        idle = waiting_.empty() ? idle % kIdleTicks + 1 : 0;  // from 1 again after it has slept
    }
}

void RemotePeers::on_notice(const std::optional<Membership::Notice>& notice) {
    if (notice) membership_.give_notice(*notice);
    wake();
}

void RemotePeers::wake() {
    const std::lock_guard lock(mutex_);
    for (Transport::TransportRequest* request : waiting_) request->abort();
}

template <typename Begin>
RemotePeers::Handle RemotePeers::begin(RemoteRequest request, const Begin& make) {
    request.deadline = Clock::now() + request.timeout;
    std::optional<BrokenMessage> broken;
    try {
        request.handle = make();
        return std::make_shared<RemoteRequest>(std::move(request));
    } catch (const Transport::TransportError& error) {
        broken.emplace(error);
    }
    throw_broken(request, *broken);
}

RemotePeers::Handle RemotePeers::send(int to, int tag, const std::byte* data, std::size_t bytes,
                                      std::chrono::milliseconds timeout, Transport::Owner owner) {
    return begin({nullptr, to, tag, true, bytes, timeout, {}},
                 [&] { return transport_->send(to, tag, data, bytes, std::move(owner)); });
}

RemotePeers::Handle RemotePeers::receive(int from, int tag, std::byte* data, std::size_t bytes,
                                         std::chrono::milliseconds timeout, Transport::Owner owner) {
    return begin({nullptr, from, tag, false, bytes, timeout, {}},
                 [&] { return transport_->receive(from, tag, data, bytes, std::move(owner)); });
}

RemotePeers::Handle RemotePeers::receive_from_any(int tag, std::byte* data, std::size_t bytes,
                                                  std::chrono::milliseconds timeout, Transport::Owner owner,
                                                  const ClaimPtr& claim) {
    return begin({nullptr, Transport::kAnyone, tag, false, bytes, timeout, {}},
                 [&] { return transport_->receive_from_any(tag, data, bytes, std::move(owner), claim); });
}

void RemotePeers::wait(const Handle& request) {
    if (!wait_until_deadline(request)) throw_late(*request);
}

bool RemotePeers::wait_until_deadline(const Handle& request) {
    const TraceSpan span(TraceKind::kWait, request->bytes, request->peer);
    for (bool is_due = false;;) {
        std::optional<BrokenMessage> broken;
        try {
            if (wait_a_while(*request)) {
                if (request->peer == Transport::kAnyone) request->peer = request->handle->source();
                request->trace.end(request->outgoing, request->peer, request->bytes);
                return true;
            }
        } catch (const Transport::LengthError& error) {
            throw_other_length(*request, error.what());
        } catch (const Transport::TransportError& error) {
            broken.emplace(error);
        } catch (...) {  // Ctrl-C
            membership_.give_notice({CommError::Kind::kInterrupted, membership_.group_rank(membership_.rank())});
            throw;
        }
        if (broken) throw_broken(*request, *broken);
        check_failures(*request);
        // An aborted wait does not report a message that has arrived: this rank may have been stopped meanwhile. So it
        // waits once more.
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

bool RemotePeers::wait_a_while(RemoteRequest& request) {
    struct ActiveWait {
        RemotePeers& remote;
        Transport::TransportRequest* request;
        ActiveWait(RemotePeers& remote, Transport::TransportRequest* request) : remote(remote), request(request) {
            const std::lock_guard lock(remote.mutex_);
            if (!remote.ticker_.joinable())
                remote.ticker_ =
                    start_thread(remote.membership_.own_name() + ": the thread that limits waits for other hosts",
                                 [&remote] { remote.run_ticker(); });
            if (std::exchange(remote.asleep_, false)) remote.wakes_.notify_all();
            remote.waiting_.insert(request);
        }
        ~ActiveWait() {
            const std::lock_guard lock(remote.mutex_);
            remote.waiting_.erase(request);
        }
    } waiting(*this, request.handle.get());
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(request.deadline - Clock::now());
    return request.handle->wait(std::max(left, 0ms) + kTransportMargin);
}

bool RemotePeers::is_over() {
    if (!membership_.notice() && notice_request_->is_done()) receive_notice(1ms);
    return membership_.notice().has_value();
}

void RemotePeers::check_failures(const RemoteRequest& request) {
    is_over();
    check_refusal(false, [&] { return text(request, ""); });
    if (tags.is_collective(request.tag)) slow_call_.look(*transport_, membership_);
    if (request.peer != Transport::kAnyone) diagnosis_->answer(request.peer);
    int culprit = membership_.dead_rank();
    if (culprit < 0 && request.peer == Transport::kAnyone) culprit = transport_->dead_rank();
    if (culprit >= 0 && !membership_.notice()) {
        const std::lock_guard lock(mutex_);
        const auto now = Clock::now();
        if (death_seen_ == Clock::time_point{}) death_seen_ = now;
        if (now - death_seen_ > kMomentToFinish)
            throw_failure({CommError::Kind::kPeerDied, culprit}, [&] { return text(request, ""); });
    }
    membership_.check_failures([](int) { return false; }, [&] { return text(request, ""); });
}

void RemotePeers::throw_other_length(const RemoteRequest& request, const std::string& reason) {
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
    const Membership::Notice verdict = diagnosis_->diagnose(awaited, [this] { return is_over(); });
    check_refusal(true, what);  // this rank may have missed replies
    throw_failure(verdict, what);
}

// Throws if this rank has no descriptor or port left: see Transport.
void RemotePeers::check_refusal(bool now, const Membership::What& what) {
    const std::string refusal = transport_->refusal(now);
    if (refusal.empty() || membership_.notice()) return;
    throw_failure({CommError::Kind::kExhausted, membership_.group_rank(membership_.rank())},
                  [&] { return what() + " (" + refusal + ")"; });
}

RemotePeers::BrokenMessage::BrokenMessage(const Transport::TransportError& error)
    : kind(dynamic_cast<const Transport::UnreachableError*>(&error) ? CommError::Kind::kUnreachable
           : dynamic_cast<const Transport::ExhaustedError*>(&error) ? CommError::Kind::kExhausted
                                                                    : CommError::Kind::kPeerDied),
      reason(error.what()) {}

void RemotePeers::throw_broken(const RemoteRequest& request, const BrokenMessage& broken) {
    if (!membership_.notice()) receive_notice(kTimeToReceive);
    const int peer = request.peer == Transport::kAnyone && request.handle ? request.handle->source() : request.peer;
    const auto what = [&] { return text(request, broken.reason); };
    const int me = membership_.group_rank(membership_.rank());
    if (broken.kind == CommError::Kind::kExhausted) throw_failure({broken.kind, me}, what);
    if (peer == Transport::kAnyone)  // a transport fails such a receive only when it closes
        throw_failure({CommError::Kind::kInterrupted, me}, what);
    throw_failure({broken.kind, peer, broken.kind == CommError::Kind::kUnreachable ? me : -1}, what);
}

std::vector<TimeoutDiagnosis::Link> RemotePeers::cut_links() {
    auto links = diagnosis_->cut_links();
    const auto notice = membership_.notice();
    if (notice && notice->kind == CommError::Kind::kUnreachable) links.push_back({notice->culprit, notice->other});
    return links;
}

void RemotePeers::throw_failure(const Membership::Notice& notice, const Membership::What& what) {
    if (membership_.give_notice(notice)) membership_.throw_failure(notice, what);
    membership_.check_abort(what);  // the first notice stands
    std::abort();                   // there is a notice, so it has thrown
}

// Waits for the notice that another rank may have sent before it went. A wait of the transport that is too late would
// close all connections, and then this rank could not send a notice itself.
void RemotePeers::receive_notice(std::chrono::milliseconds limit) {
    const auto until = Clock::now() + limit;
    while (!notice_request_->is_done()) {
        if (Clock::now() >= until) return;
        std::this_thread::sleep_for(kBetweenLooks);
    }
    try {
        if (notice_request_->wait(limit))
            membership_.give_notice({static_cast<CommError::Kind>(received_notice_.kind), received_notice_.culprit,
                                     received_notice_.other});
    } catch (const Transport::TransportError&) {  // it will not come
    }
}

void RemotePeers::end() {
    {
        const std::lock_guard lock(mutex_);
        if (std::exchange(ended_, true)) return;
    }
    membership_.give_notice(
        {CommError::Kind::kInterrupted, membership_.group_rank(membership_.rank())});  // the first notice stands
    const auto interrupt = interrupt_of([this] { send_notice(); });
    // A receive without a sender times out: by that a transport ends all messages, and does not use their memory.
    const auto forced = interrupt_of([this] {
        const auto nothing = std::make_shared<std::byte>();
        transport_->receive(remote_ranks_.front(), tags.unused(), nothing.get(), 1, nothing)->wait(1ms);
    });
    for (const auto& error : {interrupt, forced}) {
        if (error) std::rethrow_exception(error);  // only now, when no message uses memory any more
    }
}

void RemotePeers::leave() {
    if (!membership_.notice() && !has_left_.exchange(true)) transport_->leave();
}

// Sends the notice twice. The thread of TimeoutDiagnosis on a remote rank wakes up at once, but may be busy with other
// messages, and so too late. So the notice also goes to the receive that all ranks have posted from the beginning.
void RemotePeers::send_notice() {
    const auto notice = membership_.notice();
    diagnosis_->send_notice(*notice);
    const auto message = std::make_shared<const NoticeMessage>(
        NoticeMessage{static_cast<std::int32_t>(notice->kind), notice->culprit, notice->other});
    std::vector<Transport::Handle> requests;
    for (const int other : remote_ranks_) {
        try {
            const auto* data = reinterpret_cast<const std::byte*>(message.get());
            requests.push_back(transport_->send(other, tags.notice(), data, sizeof(NoticeMessage), message));
        } catch (const Transport::TransportError&) {  // it is gone
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

std::string RemotePeers::text(const RemoteRequest& request) const {
    const std::string peer = request.peer == Transport::kAnyone ? "any rank" : membership_.title(request.peer);
    const std::string tag = request.tag > tags.largest_of_users() ? "" : ", tag " + std::to_string(request.tag);
    const std::string call = request.tag == tags.barrier() ? "monitored_barrier: " : "";
    return call + (request.outgoing ? "send(" : "recv(") + std::to_string(request.bytes) + " bytes " +
           (request.outgoing ? "to " : "from ") + peer + tag + ")";
}

std::string RemotePeers::text(const RemoteRequest& request, const std::string& reason) const {
    return text(request) + " within " + std::to_string(request.timeout.count()) + " ms" +
           (reason.empty() ? "" : " (" + reason.substr(0, 200) + ")");
}

}  // namespace dist_prims
