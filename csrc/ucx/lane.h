// The messages of one rank through a worker of UCX, and the waits for them.
//
// As in TcpLane, the thread that waits moves the messages of all: it polls the worker, and when that has brought
// nothing for a while it sleeps until the descriptor of the worker is readable. The calls of UCX are made under the
// lock.
//
//     tag of UCX, 64 bits:    group 12 | sender 21 | tag 31
//
// The bits of the group are from its key, so a message of another group, which a reused port may bring here, meets no
// receive.
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

    Lane(std::unique_ptr<Worker> worker, std::vector<std::string> addresses, int rank, const std::string& key,
         bool polls);
    ~Lane();
    Lane(const Lane&) = delete;

    // These throw TransportError if the lane has been closed.
    void send(const MessagePtr& message);
    void receive(const MessagePtr& message);

    // Throws TransportError if the message has failed.
    WaitResult wait(Message& message, std::chrono::milliseconds limit);
    bool is_done(const Message& message);  // or has failed
    int source(const Message& message);
    void abort(Message& message);
    // The message is not needed any more. Its memory is not used afterwards, unless it has an owner.
    void release(const MessagePtr& message);

    // The process of a rank has ended, or it has left the group. Messages that it has sent before are still received.
    void on_gone(int peer, const Failure& failure);
    // Gives the network what has been sent, for a limited time.
    void leave();
    // Fails all messages, also future ones. What has been sent is given to the network first, for a limited
    // time.
    void close(const std::string& reason);

    // Moves messages. Returns true if there is nothing left to do: descriptor() becomes readable when there is again.
    bool progress();
    int descriptor() const { return worker_->descriptor(); }
    // For how long a thread may sleep before it must call progress() in any case; negative: without limit.
    std::chrono::milliseconds longest_sleep();
    // Whether much is to be sent or received.
    bool is_loaded();
    // Whether no thread waits, and none has since `waits`, the number of waits so far, which is brought up to date.
    bool is_idle_since(std::uint64_t& waits);

private:
    // The connection to another rank. Its address is the argument of UCX's error handler.
    struct Peer {
        Lane* lane;
        ucp_ep_h endpoint = nullptr;     // made by the first message to the rank
        bool is_broken = false;          // the endpoint: it must be closed
        std::string gone{};              // why nothing can be sent any more; empty as long as the rank is there
        bool is_unreachable = false;     // no device of UCX leads to the rank, or its host answers nothing
        Clock::time_point gone_since{};  // when it went
        bool has_failed = false;         // nothing can come any more either
    };
    class LockAndFree;

    static void on_sent(void* request, ucs_status_t status, void* message);
    static void on_received(void* request, ucs_status_t status, const ucp_tag_recv_info_t* info, void* message);
    static void on_error(void* peer, ucp_ep_h endpoint, ucs_status_t status);

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

    std::mutex mutex_;  // of all below, and of the worker
    std::vector<Peer> peers_;
    std::unordered_map<const Message*, MessagePtr> pending_;  // whose memory UCX uses
    std::vector<MessagePtr> unmatched_with_claim_;            // receives that no message has met
    std::vector<MessagePtr> freed_without_lock_;              // freed without the lock: an owner may run any code
    std::vector<void*> closing_requests_;                     // requests of UCX that close endpoints
    bool has_unhandled_failures_ = false;                     // that handle_failures() has not yet dealt with
    std::string close_reason_;                                // why; empty as long as the lane is open
    WaitingThreads<Message> waiting_;
    Polling polling_;
};

}  // namespace dist_prims::ucx
