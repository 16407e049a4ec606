// Communication with the ranks of other hosts: messages through a transport, and how a failure on one host becomes
// known on the others.
//
// On one host all ranks see the notice in shared memory. Across hosts a rank whose group has ended sends the notice to
// all remote ranks, which have posted a receive for it in advance, and then closes its connections. A remote rank that
// waits for it thereby wakes up, and looks for the notice before it reports the closed connection as the cause. A rank
// that only times out runs a timeout diagnosis.
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
    // Throws if the request fails. The group has ended then, unless the message had another length. `timeout` counts
    // from `since`, for a request that was posted early.
    void wait(const Handle& request);
    void wait(const Handle& request, std::chrono::milliseconds timeout, Clock::time_point since);
    // The same, but returns false if the request is not done by its deadline, and does not end the group then.
    bool wait_until_deadline(const Handle& request);
    // Whether the request is done now, for one whose deadline has passed. Throws if the request fails.
    bool is_done_after_deadline(const Handle& request);
    // Whether wait() would return or throw at once.
    static bool is_done(const Handle& request) { return request->handle->is_done(); }
    // Throws if the group has ended, or if it is too late for the request.
    void check(const Handle& request);
    // Ends the group because a rank is late for what `what` describes, and names the rank that blocks it.
    [[noreturn]] void throw_late(int awaited, const Membership::What& what);
    // This rank leaves the group. Only the first call has an effect, and none if the group has ended: the other ranks
    // have the notice then.
    void leave();
    // See Transport.
    void progress() { transport_->progress(); }
    void move_in_background() { transport_->move_in_background(); }
    // See TimeoutDiagnosis; also the link that the notice names.
    std::vector<TimeoutDiagnosis::Link> cut_links();
    // Wakes the waits of this rank, from another thread, so that they check for failures.
    void wake();

    // Called when the group has ended: sends the notice to the other hosts and releases all memory that was given for
    // messages.
    void end();

    const Tags tags;

private:
    struct NoticeMessage {
        std::int32_t kind, culprit, other;
    };
    struct BrokenMessage {
        explicit BrokenMessage(const Transport::TransportError& error);
        CommError::Kind kind;
        std::string reason;
    };

    template <typename Begin>
    Handle begin(RemoteRequest request, const Begin& make);
    bool wait_a_while(RemoteRequest& request);
    void on_notice(const std::optional<Membership::Notice>& notice);
    bool is_over();
    void check_failures(const RemoteRequest& request);
    void check_refusal(bool now, const Membership::What& what);
    [[noreturn]] void throw_other_length(const RemoteRequest& request, const std::string& reason);
    [[noreturn]] void throw_late(const RemoteRequest& request);
    [[noreturn]] void throw_broken(const RemoteRequest& request, const BrokenMessage& broken);
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
    Transport::Handle notice_request_;  // asked for
    std::atomic<bool> has_left_{false};
    SlowCall slow_call_;

    std::mutex mutex_;  // of all below
    std::set<Transport::TransportRequest*> waiting_;
    bool ended_ = false, closing_ = false, asleep_ = false;
    Clock::time_point death_seen_{};
    std::condition_variable wakes_;
    std::thread ticker_;  // aborts long waits at intervals, since a transport cannot limit a wait without closing

    const std::shared_ptr<TimeoutDiagnosis>
        diagnosis_;  // last: its thread calls wake(); shared with the hook in Membership, which stays
};

}  // namespace dist_prims
