// A lane: the messages of one rank through one worker of UCX, and the waits for them. A worker is UCX's object that
// moves messages; an endpoint is its connection to another rank's worker.
//
// As in TcpLane, a thread that waits moves the messages of all threads: it polls the worker, and after some polls that
// moved nothing it sleeps until the descriptor of the worker is readable. While no thread waits, the transport's thread
// does that (tcp/background_mover.h). All calls of UCX are made under the lock, and UCX calls the on_... functions
// within them.
//
//     tag of UCX, 64 bits:    group 12 | sender 21 | tag 31
//
// The bits of the group are taken from its key. A message of another group, which a reused port may bring here,
// therefore meets no receive.
//
// When a rank has gone, this rank fails its sends to it at once, but its receives only when nothing has arrived for
// kTimeToArrive: messages that the rank had sent before may still arrive.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "../tcp/polling.h"
#include "../tcp/waiting_threads.h"
#include "message.h"
#include "worker.h"

namespace dist_prims::ucx {

class Lane {
public:
    using Clock = std::chrono::steady_clock;
    enum class WaitResult { kDone, kAborted, kLate };

    // Args:
    //     addresses: of the workers of all ranks, by rank.
    //     key: of the group; see TcpEndpoint.
    //     polls: see Polling.
    Lane(std::unique_ptr<Worker> worker, std::vector<std::string> addresses, int rank, const std::string& key,
         bool polls);
    ~Lane();
    Lane(const Lane&) = delete;

    // These throw TransportError if the lane has been closed.
    void send(const MessagePtr& message);
    void receive(const MessagePtr& message);

    // Throws TransportError if the message has failed.
    WaitResult wait(Message& message, std::chrono::milliseconds limit);
    bool is_done(const Message& message);  // also true if the message has failed
    int source(const Message& message);
    void abort(Message& message);
    // The caller does not need the message any more. Its memory is not used afterwards, unless it has an owner.
    void release(const MessagePtr& message);

    // The process of a rank has ended, or it has left the group. Messages that it has sent before are still received.
    void on_gone(int peer, const Failure& failure);
    // Gives the network what has been sent, for a limited time.
    void leave();
    // Fails all messages, also future ones. What has been sent is given to the network first, for a limited time.
    void close(const std::string& reason);

    // Moves messages without waiting. Returns true if nothing is left to do now, and descriptor() will become readable
    // when there is something; false: call it again.
    bool progress();
    int descriptor() const { return worker_->descriptor(); }
    // For how long a thread may sleep before it must call progress() in any case; negative: without limit.
    std::chrono::milliseconds longest_sleep();
    // Whether many bytes are to be sent or received.
    bool is_loaded();
    // Whether no thread waits, and none has waited since `waits`, the number of waits so far, which is updated.
    bool is_idle_since(std::uint64_t& waits);

private:
    // What the lane knows of another rank. UCX's error handler gets a pointer to it.
    struct Peer {
        Lane* lane;
        ucp_ep_h endpoint = nullptr;     // the connection, made by the first message to the rank
        bool is_broken = false;          // UCX has reported an error of the endpoint: it must be closed
        std::string gone{};              // why nothing can be sent any more; empty as long as the rank is there
        bool is_unreachable = false;     // no device of UCX leads to the rank, or its host answers nothing
        Clock::time_point gone_since{};  // when `gone` was set
        bool has_failed = false;         // nothing can arrive any more either: all messages have been failed
    };
    class LockAndFree;

    static void on_sent(void* request, ucs_status_t status, void* message);
    static void on_received(void* request, ucs_status_t status, const ucp_tag_recv_info_t* info, void* message);
    static void on_error(void* peer, ucp_ep_h endpoint, ucs_status_t status);

    // These need the lock.
    ucp_tag_t tag_of(int sender, int tag) const;
    Peer& peer_of(const Message& message) { return peers_[static_cast<std::size_t>(message.peer)]; }
    ucp_ep_h endpoint_to(Peer& peer);
    void check_open() const;
    void track(const MessagePtr& message, ucs_status_ptr_t result);
    std::byte* receive_buffer(Message& message);
    void match_receives_with_claim();
    static ucp_request_param_t receive_parameters(Message& message);
    void end_message(Message& message, ucs_status_t status, const ucp_tag_recv_info_t& info = {});
    void mark_gone(Peer& peer, const std::string& reason);
    static void fail_message(Message& message, const Peer& peer);
    void fail_peer(Peer& peer);
    void fail_all(const std::function<bool(const Message&)>& is_concerned, const Peer& cause);
    unsigned progress_worker();
    void handle_failures(bool is_quiet);
    void close_endpoint(Peer& peer);
    void flush();
    void wait_for_requests(std::vector<void*>& requests, Clock::time_point until);
    bool arm();
    bool sleep(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds limit);

    std::unique_ptr<Worker> worker_;
    const std::vector<std::string> addresses_;
    const int rank_;
    const std::uint64_t group_;  // the first bits of all tags

    std::mutex mutex_;                                        // the lock: of all below, and of the worker
    std::vector<Peer> peers_;                                 // by rank
    std::unordered_map<const Message*, MessagePtr> pending_;  // messages whose memory UCX uses
    std::vector<MessagePtr> unmatched_with_claim_;            // receives with a claim that no message has met
    std::vector<MessagePtr> freed_without_lock_;  // freed by LockAndFree: the end of an owner may run any code
    std::vector<void*> closing_requests_;         // UCX's requests that close endpoints
    bool has_unhandled_failures_ = false;         // handle_failures() has something to do
    std::string close_reason_;                    // why the lane has been closed; empty as long as it is open
    WaitingThreads<Message> waiting_;
    Polling polling_;
};

}  // namespace dist_prims::ucx
