// Communication with the ranks of other hosts: messages through a transport, and how a failure on one host becomes
// known on the others. Each rank of a MultiHostGroup has one RemotePeers, which Router, UserMessages,
// monitored_barrier() and the adapter for torch call.
//
// The notice is the cause of the group's end (see ../shm/membership.h). All ranks of one host see it in shared memory.
// A rank whose group has ended also sends the notice to the remote ranks with which it has exchanged messages, and to
// its successors (see timeout_diagnosis.h), which forward it. All ranks have posted a receive for it in advance. Then
// the rank closes its connections. That ends the waits of a remote rank, which looks for the notice before it reports
// the closed connection as the cause. A rank whose wait times out runs a timeout diagnosis.
//
// Any thread may post and wait. RemotePeers has a thread, the ticker, which aborts waits at intervals so that the
// waiting threads check for failures; TimeoutDiagnosis has another, which calls on_notice().
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "../common/trace.h"
#include "../shm/membership.h"
#include "slow_call.h"
#include "tags.h"
#include "timeout_diagnosis.h"
#include "transport.h"

namespace dist_prims {

class RemotePeers {
public:
    // Extra time for waits between ranks of this host. A local rank may be blocked by a remote rank; the wait for the
    // remote rank must time out first, because its error names the right rank.
    static constexpr std::chrono::seconds kLocalMargin{2};

    struct RemoteRequest {
        Transport::Handle handle;
        int peer, tag;  // the peer of a receive may be Transport::kAnyone
        bool outgoing;
        std::size_t bytes;
        std::chrono::milliseconds timeout;
        Clock::time_point deadline;
        TraceTransfer trace{};
    };
    using Handle = std::shared_ptr<RemoteRequest>;

    // `remote_ranks` are the ranks of the group on other hosts.
    RemotePeers(std::unique_ptr<Transport> transport, Membership& membership, const std::vector<int>& remote_ranks);
    ~RemotePeers();
    RemotePeers(const RemotePeers&) = delete;

    // `tag` is one of `tags`. `owner`: see Transport.
    Handle send(int to, int tag, const std::byte* data, std::size_t bytes, std::chrono::milliseconds timeout,
                Transport::Owner owner = nullptr);
    Handle receive(int from, int tag, std::byte* data, std::size_t bytes, std::chrono::milliseconds timeout,
                   Transport::Owner owner = nullptr);
    bool has_claims() const { return transport_->has_claims(); }  // see Transport
    // A receive of a user from any rank. A receive that is posted in another place as well has the same claim.
    Handle receive_from_any(int tag, std::byte* data, std::size_t bytes, std::chrono::milliseconds timeout,
                            Transport::Owner owner, const ClaimPtr& claim);
    // Called before the first message of a collective: see SlowCall.
    void begin_call(const Call& call, std::chrono::milliseconds timeout) { slow_call_.begin(call, timeout); }
    // Returns when the request is done. Throws CommError if it fails or is late. The group has ended then, unless only
    // the length of the message was wrong. `timeout` counts from `since`, for a request that was posted early.
    void wait(const Handle& request);
    void wait(const Handle& request, std::chrono::milliseconds timeout, Clock::time_point since);
    // As wait(), but if the request is not done by its deadline, returns false and does not end the group.
    bool wait_until_deadline(const Handle& request);
    // Whether the request is done now, for one whose deadline has passed. Throws if the request fails.
    bool is_done_after_deadline(const Handle& request);
    // Whether wait() would return or throw at once.
    static bool is_done(const Handle& request) { return request->handle->is_done(); }
    // Throws if the group has ended, or if the deadline of the request has passed.
    void check(const Handle& request);
    // Ends the group: `awaited` is late for what `what` describes. The error names the rank that blocks `awaited`.
    [[noreturn]] void throw_late(int awaited, const Membership::What& what);
    // This rank leaves the group. A later call does nothing, as does a call after the group has ended: the other ranks
    // have the notice then.
    void leave();
    // See Transport.
    void progress() { transport_->progress(); }
    void move_in_background() { transport_->move_in_background(); }
    // The links that TimeoutDiagnosis has found to be cut, and the link that the notice names.
    std::vector<TimeoutDiagnosis::Link> cut_links();
    // Wakes the waits of this rank, from another thread, so that they check for failures.
    void wake();

    // Ends the group if it has not ended, sends the notice to the other hosts, and closes the transport, which does not
    // use the memory of any message afterwards.
    void end();

    const Tags tags;

private:
    struct NoticeMessage {
        std::int32_t kind, culprit, other;
    };
    // Why the transport failed a message.
    struct MessageFailure {
        explicit MessageFailure(const Transport::TransportError& error);
        CommError::Kind kind;
        std::string reason;
    };

    template <typename Post>
    Handle post(RemoteRequest request, const Post& post_to_transport);
    bool wait_until_abort(RemoteRequest& request);
    void on_notice(const std::optional<Membership::Notice>& notice);
    bool look_for_notice();
    void check_failures(const RemoteRequest& request);
    void throw_if_exhausted(bool now, const Membership::What& what);
    [[noreturn]] void throw_mismatch_of_length(const RemoteRequest& request, const std::string& reason);
    [[noreturn]] void throw_late(const RemoteRequest& request);
    [[noreturn]] void throw_broken(const RemoteRequest& request, const MessageFailure& failure);
    [[noreturn]] void throw_failure(const Membership::Notice& notice, const Membership::What& what);
    void receive_notice(std::chrono::milliseconds limit);
    void send_notice();
    void run_ticker();
    std::string text(const RemoteRequest& request) const;
    std::string text(const RemoteRequest& request, const std::string& reason) const;

    Membership& membership_;
    const std::vector<int> remote_ranks_;
    const std::unique_ptr<Transport> transport_;
    NoticeMessage received_notice_{-1, -1, -1};
    Transport::Handle notice_request_;              // the receive of a notice into received_notice_
    std::vector<std::atomic<bool>> has_exchanged_;  // by group rank: this rank has posted messages to or from it
    std::atomic<bool> has_left_{false};
    SlowCall slow_call_;

    std::mutex mutex_;  // of all below
    std::set<Transport::TransportRequest*> active_waits_;
    bool has_ended_ = false;            // end() has been called
    Clock::time_point failure_seen_{};  // when this rank first saw that another has failed; zero: not yet
    bool is_closing_ = false;           // the ticker must return
    bool is_asleep_ = false;            // the ticker sleeps until there is a wait
    std::condition_variable ticker_wakes_;
    std::thread ticker_;  // aborts long waits, since a transport cannot limit a wait without closing

    // The last member, since its thread calls wake(). Shared with the hook in Membership, which lives longer.
    const std::shared_ptr<TimeoutDiagnosis> diagnosis_;
};

}  // namespace dist_prims
