#include "lane.h"

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "../common/authentication.h"
#include "../common/thread.h"

namespace dist_prims::ucx {
namespace {

using namespace std::chrono_literals;

constexpr int kTagBits = 31, kRankBits = 21;
constexpr ucp_tag_t kAllBits = ~ucp_tag_t{0};
constexpr ucp_tag_t kSenderBits = ((ucp_tag_t{1} << kRankBits) - 1) << kTagBits;
constexpr ucp_tag_t kFromAny = kAllBits & ~kSenderBits;  // the bits that are compared

constexpr auto kTimeToArrive = 100ms;  // of what a rank sent before it went; it may wait in buffers of this host
constexpr auto kBetweenLooks = 50ms;   // for the end of kTimeToArrive
constexpr auto kTimeToFlush = 200ms, kTimeToClose = 200ms;
constexpr int kMaxPolls = 64;                    // of progress, so that other threads get the lock
constexpr std::size_t kLoadedBytes = 128 << 10;  // bytes

int sender_of(const ucp_tag_recv_info_t& info) {
    return static_cast<int>((info.sender_tag & kSenderBits) >> kTagBits);
}

std::uint64_t group_bits(const std::string& key) {
    const Digest code = authentication_code(key, "tags of UCX");
    std::uint64_t bits;
    std::memcpy(&bits, code.data(), sizeof(bits));
    return bits;
}

// Frees the requests that have been completed, and removes them.
void remove_completed(std::vector<void*>& requests) {
    std::erase_if(requests, [](void* request) {
        const bool is_done = calls()->request_check_status(request) != UCS_INPROGRESS;
        if (is_done) calls()->request_free(request);
        return is_done;
    });
}

}  // namespace

// Holds the lock, and then frees the messages in freed_without_lock_.
class Lane::LockAndFree {
public:
    explicit LockAndFree(Lane& lane) : lane_(lane), lock(lane.mutex_) {}
    ~LockAndFree() {
        const auto freed = std::exchange(lane_.freed_without_lock_, {});
        lock.unlock();
    }
    LockAndFree(const LockAndFree&) = delete;

private:
    Lane& lane_;

public:
    std::unique_lock<std::mutex> lock;
};

Lane::Lane(std::unique_ptr<Worker> worker, std::vector<std::string> addresses, int rank, const std::string& key,
           bool polls)
    : worker_(std::move(worker)),
      addresses_(std::move(addresses)),
      rank_(rank),
      group_(group_bits(key) << (kTagBits + kRankBits)),
      peers_(addresses_.size(), Peer{this}),
      polling_(polls) {
    if (addresses_.size() > std::size_t{1} << kRankBits) throw std::invalid_argument("too many ranks for UCX");
}

Lane::~Lane() {
    close("the transport has been destroyed");
    worker_.reset();  // first, because it may use the memory of pending messages
}

ucp_tag_t Lane::tag_of(int sender, int tag) const {
    return group_ | static_cast<ucp_tag_t>(static_cast<unsigned>(sender)) << kTagBits | static_cast<unsigned>(tag);
}

void Lane::check_open() const {
    if (!close_reason_.empty()) throw Transport::TransportError(close_reason_);
}

// The connection to a rank, which is made if there is none. If that fails, returns null, and the rank is marked as
// gone.
ucp_ep_h Lane::endpoint_to(Peer& peer) {
    if (peer.endpoint) return peer.endpoint;
    const std::string& address = addresses_[static_cast<std::size_t>(&peer - peers_.data())];
    ucp_ep_params_t parameters{};
    parameters.field_mask =
        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    parameters.address = reinterpret_cast<const ucp_address_t*>(address.data());
    parameters.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    parameters.err_handler = {&Lane::on_error, &peer};
    const ucs_status_t status = calls()->ep_create(worker_->get(), &parameters, &peer.endpoint);
    if (status == UCS_OK) return peer.endpoint;
    peer.endpoint = nullptr;
    peer.is_unreachable = status == UCS_ERR_UNREACHABLE;
    const char* remedy = peer.is_unreachable
                             ? " from the devices of UCX on this rank: set UCX_NET_DEVICES, or GLOO_SOCKET_IFNAME, to "
                               "an interface that leads there"
                             : "";
    mark_gone(peer, std::string("ucp_ep_create(): ") + calls()->status_string(status) + remedy);
    return nullptr;
}

void Lane::send(const MessagePtr& message) {
    const LockAndFree guard(*this);
    check_open();
    Peer& peer = peer_of(*message);
    // 1. A message to a rank that has gone fails.
    const ucp_ep_h endpoint = peer.gone.empty() ? endpoint_to(peer) : nullptr;
    if (!endpoint) return fail_message(*message, peer);
    // 2. Copy the data unless it has an owner, and give it to UCX.
    if (!message->owner && message->bytes) {
        message->staging.reset(new std::byte[message->bytes]);
        std::memcpy(message->staging.get(), message->data, message->bytes);
    }
    ucp_request_param_t parameters{};
    parameters.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    parameters.cb.send = &Lane::on_sent;
    parameters.user_data = message.get();
    track(message, calls()->tag_send_nbx(endpoint, message->staging ? message->staging.get() : message->data,
                                         message->bytes, tag_of(rank_, message->tag), &parameters));
}

void Lane::receive(const MessagePtr& message) {
    const LockAndFree guard(*this);
    check_open();
    // 1. A receive with a claim waits for a message; see match_receives_with_claim().
    if (message->claim) {
        unmatched_with_claim_.push_back(message);
        progress_worker();
        return;
    }
    // 2. Any other receive is given to UCX. If its sender has failed, no message will meet it but one that UCX has
    // already.
    const bool is_from_any = message->peer == Transport::kAnyone;
    const ucp_request_param_t parameters = receive_parameters(*message);
    track(message, calls()->tag_recv_nbx(worker_->get(), receive_buffer(*message), message->bytes,
                                         tag_of(is_from_any ? 0 : message->peer, message->tag),
                                         is_from_any ? kFromAny : kAllBits, &parameters));
    if (message->request && !is_from_any && peer_of(*message).has_failed) {
        fail_message(*message, peer_of(*message));
        calls()->request_cancel(worker_->get(), message->request);
    }
}

// The message has been given to UCX, which has returned `result`: a status if the message has ended, or else its
// request.
void Lane::track(const MessagePtr& message, ucs_status_ptr_t result) {
    if (message->is_done || !message->error.empty()) return;  // UCX has called on_received() already
    if (!UCS_PTR_IS_PTR(result)) return end_message(*message, UCS_PTR_STATUS(result));
    message->request = result;
    pending_.emplace(message.get(), message);
    for (int poll = 0; poll < kMaxPolls && progress_worker(); ++poll) {
    }
    waiting_.wake_others();
}

// The memory into which UCX writes the bytes of a receive.
std::byte* Lane::receive_buffer(Message& message) {
    if (!message.owner && message.bytes && !message.staging) message.staging.reset(new std::byte[message.bytes]);
    return message.staging ? message.staging.get() : message.data;
}

// With UCP_OP_ATTR_FLAG_NO_IMM_CMPL, UCX calls on_received() also for a receive that ends at once. Only the callback
// gets the length of the message: UCX 1.13 does not fill in `recv_info`.
ucp_request_param_t Lane::receive_parameters(Message& message) {
    ucp_request_param_t parameters{};
    parameters.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    parameters.cb.recv = &Lane::on_received;
    parameters.user_data = &message;
    return parameters;
}

// Looks for messages that meet a receive with a claim. UCX does not know claims, so such a receive is given to UCX only
// when a message for it has arrived and the claim has been taken.
void Lane::match_receives_with_claim() {
    for (std::size_t index = 0; index < unmatched_with_claim_.size();) {
        const MessagePtr message = unmatched_with_claim_[index];
        const ucp_tag_t tag = tag_of(0, message->tag);
        ucp_tag_recv_info_t info{};
        if (!calls()->tag_probe_nb(worker_->get(), tag, kFromAny, 0, &info) || !message->claim->take()) {
            ++index;
            continue;
        }
        const ucp_tag_message_h arrived = calls()->tag_probe_nb(worker_->get(), tag, kFromAny, 1, &info);  // removes it
        std::erase(unmatched_with_claim_, message);
        message->peer = sender_of(info);
        const ucp_request_param_t parameters = receive_parameters(*message);
        track(message, calls()->tag_msg_recv_nbx(worker_->get(), receive_buffer(*message), message->bytes, arrived,
                                                 &parameters));
        index = 0;  // track() moves messages, and may have changed the list
    }
}

void Lane::on_sent(void* request, ucs_status_t status, void* user_data) {
    auto& message = *static_cast<Message*>(user_data);
    calls()->request_free(request);
    message.lane->end_message(message, status);
}

void Lane::on_received(void* request, ucs_status_t status, const ucp_tag_recv_info_t* info, void* user_data) {
    auto& message = *static_cast<Message*>(user_data);
    const ucp_tag_recv_info_t received = *info;  // `info` is a part of the request
    calls()->request_free(request);
    message.lane->end_message(message, status, received);
}

// UCX has ended the message, and does not use its memory any more.
void Lane::end_message(Message& message, ucs_status_t status, const ucp_tag_recv_info_t& info) {
    message.request = nullptr;
    // 1. Set the result. A message that has an error already keeps it.
    const bool has_right_length = message.is_outgoing || info.length == message.bytes || message.may_be_shorter;
    if (status == UCS_OK && has_right_length) {
        if (!message.is_outgoing && message.staging && message.data)
            std::memcpy(message.data, message.staging.get(), info.length);
        message.is_done = true;
    } else if (message.error.empty() && (status == UCS_OK || status == UCS_ERR_MESSAGE_TRUNCATED)) {
        message.has_other_length = true;
        message.error = "rank " + std::to_string(sender_of(info)) + " has sent a message of " +
                        std::to_string(info.length) + " bytes, and the receive is for " + std::to_string(message.bytes);
    } else if (message.error.empty()) {
        message.error = calls()->status_string(status);
    }
    // 2. UCX's reference to the message ends.
    if (const auto entry = pending_.find(&message); entry != pending_.end()) {
        freed_without_lock_.push_back(std::move(entry->second));
        pending_.erase(entry);
    }
}

Lane::WaitResult Lane::wait(Message& message, std::chrono::milliseconds limit) {
    const auto until = Clock::now() + limit;
    LockAndFree guard(*this);
    if (std::exchange(message.is_aborted, false)) return WaitResult::kAborted;
    const WaitingThreads<Message>::Scope awaited(waiting_, message);
    for (Polling::Wait polling(polling_);;) {
        // 1. Has the message ended?
        if (message.is_done) return WaitResult::kDone;
        if (message.has_other_length) throw Transport::LengthError(message.error);
        if (message.is_unreachable) throw Transport::UnreachableError(message.error);
        if (!message.error.empty()) throw Transport::TransportError(message.error);
        if (message.is_aborted) return WaitResult::kAborted;
        // 2. Move messages, of all threads, as long as there are any.
        if (progress_worker()) {
            waiting_.wake_others(&message);
            guard.lock.unlock();  // gives other threads a turn
            guard.lock.lock();
            continue;
        }
        // 3. Poll again a few times, then sleep.
        if (message.is_done || polling.again(guard.lock)) continue;
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
        if (left <= 0ms) return WaitResult::kLate;
        if (!sleep(guard.lock, left)) return WaitResult::kAborted;
    }
}

bool Lane::is_done(const Message& message) {
    const LockAndFree guard(*this);
    return message.is_done || !message.error.empty();
}

int Lane::source(const Message& message) {
    const LockAndFree guard(*this);
    return message.peer;
}

void Lane::abort(Message& message) {
    const LockAndFree guard(*this);
    message.is_aborted = true;
    waiting_.wake_others();
}

void Lane::release(const MessagePtr& message) {
    const LockAndFree guard(*this);
    message->data = nullptr;
    std::erase(unmatched_with_claim_, message);
    if (message->request && !message->is_outgoing) calls()->request_cancel(worker_->get(), message->request);
}

// UCX calls this within worker_progress(), where endpoints cannot be closed: handle_failures() does it.
void Lane::on_error(void* user_data, ucp_ep_h, ucs_status_t status) {
    auto& peer = *static_cast<Peer*>(user_data);
    peer.is_broken = true;
    peer.lane->has_unhandled_failures_ = true;
    peer.lane->mark_gone(peer, calls()->status_string(status));
}

void Lane::on_gone(int peer, const Failure& failure) {
    const LockAndFree guard(*this);
    Peer& ended = peers_[static_cast<std::size_t>(peer)];
    if (ended.gone.empty()) ended.is_unreachable = failure.is_unreachable();
    mark_gone(ended, failure.text);
}

void Lane::mark_gone(Peer& peer, const std::string& reason) {
    if (!peer.gone.empty()) return;
    peer.gone = reason;
    peer.gone_since = Clock::now();
    has_unhandled_failures_ = true;
}

// Lets UCX move messages. Returns 0 if there was nothing to do.
unsigned Lane::progress_worker() {
    const unsigned count = calls()->worker_progress(worker_->get());
    if (!unmatched_with_claim_.empty()) match_receives_with_claim();
    if (has_unhandled_failures_) handle_failures(count == 0);
    return count;
}

// Closes broken endpoints, and fails the messages of ranks that have gone. `is_quiet`: nothing has arrived just now.
void Lane::handle_failures(bool is_quiet) {
    has_unhandled_failures_ = false;
    const auto now = Clock::now();
    for (Peer& peer : peers_) {
        if (peer.is_broken) close_endpoint(peer);
        if (peer.gone.empty() || peer.has_failed) continue;
        if (is_quiet && now - peer.gone_since > kTimeToArrive)
            fail_peer(peer);
        else
            has_unhandled_failures_ = true;
    }
    remove_completed(closing_requests_);
    has_unhandled_failures_ = has_unhandled_failures_ || !closing_requests_.empty();
}

void Lane::fail_message(Message& message, const Peer& peer) {
    message.error = peer.gone;
    message.is_unreachable = peer.is_unreachable;
}

// Fails all messages from and to a rank: no message can arrive from it any more.
void Lane::fail_peer(Peer& peer) {
    peer.has_failed = true;
    const int number = static_cast<int>(&peer - peers_.data());
    fail_all([number](const Message& message) { return message.peer == number; }, peer);
    close_endpoint(peer);
    waiting_.wake_others();
}

// Fails the messages for which `is_concerned` is true, with the reason of `cause`.
void Lane::fail_all(const std::function<bool(const Message&)>& is_concerned, const Peer& cause) {
    std::vector<MessagePtr> messages;
    for (const auto& [key, message] : pending_) {
        if (is_concerned(*message) && message->error.empty()) messages.push_back(message);
    }
    for (const MessagePtr& message : unmatched_with_claim_) {
        if (is_concerned(*message)) messages.push_back(message);
    }
    for (const MessagePtr& message : messages) {
        fail_message(*message, cause);
        if (!message->is_outgoing && message->request) calls()->request_cancel(worker_->get(), message->request);
        freed_without_lock_.push_back(message);
    }
}

// Closes the connection to a rank. UCX then ends the sends to it that are in progress, with an error.
void Lane::close_endpoint(Peer& peer) {
    peer.is_broken = false;
    if (!peer.endpoint) return;
    ucp_request_param_t parameters{};
    parameters.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    parameters.flags = UCP_EP_CLOSE_FLAG_FORCE;
    void* const request = calls()->ep_close_nbx(std::exchange(peer.endpoint, nullptr), &parameters);
    if (UCS_PTR_IS_PTR(request)) closing_requests_.push_back(request);
    has_unhandled_failures_ = true;
}

void Lane::leave() {
    const std::lock_guard lock(mutex_);  // without LockAndFree, which may free memory of Python: see TcpLane::leave()
    if (close_reason_.empty()) flush();
}

void Lane::close(const std::string& reason) {
    const LockAndFree guard(*this);
    if (!close_reason_.empty()) return;
    close_reason_ = reason;
    flush();
    Peer cause{this};
    cause.gone = reason;
    fail_all([](const Message&) { return true; }, cause);
    for (Peer& peer : peers_) close_endpoint(peer);
    wait_for_requests(closing_requests_, Clock::now() + kTimeToClose);
    waiting_.wake_others();
}

// Waits up to kTimeToFlush until the network has taken what was sent: UCX keeps a copy of what it does not take at
// once.
void Lane::flush() {
    std::vector<void*> requests;
    const ucp_request_param_t parameters{};
    for (Peer& peer : peers_) {
        if (!peer.endpoint || !peer.gone.empty()) continue;
        void* const request = calls()->ep_flush_nbx(peer.endpoint, &parameters);
        if (UCS_PTR_IS_PTR(request)) requests.push_back(request);
    }
    wait_for_requests(requests, Clock::now() + kTimeToFlush);
    closing_requests_.insert(closing_requests_.end(), requests.begin(),
                             requests.end());  // these end with their endpoints
}

// Moves messages until UCX has completed the requests, or until the deadline. Leaves the others in the list.
void Lane::wait_for_requests(std::vector<void*>& requests, Clock::time_point until) {
    for (;;) {
        remove_completed(requests);
        if (requests.empty() || Clock::now() >= until) return;
        if (!calls()->worker_progress(worker_->get())) ::sched_yield();
    }
}

bool Lane::progress() {
    const LockAndFree guard(*this);
    if (!close_reason_.empty()) return true;
    bool is_armed = false;
    for (int poll = 0; poll < kMaxPolls && !is_armed; ++poll) is_armed = !progress_worker() && arm();
    waiting_.wake_others();
    return is_armed;
}

// Makes the worker's descriptor readable at the next event. Returns false if there is something to do first.
bool Lane::arm() {
    return calls()->worker_arm(worker_->get()) != UCS_ERR_BUSY;
}

// Sleeps until messages can be moved, the wait of this or another thread is over, or kBetweenLooks have passed. Returns
// false if a signal has interrupted the sleep.
bool Lane::sleep(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds limit) {
    if (!arm()) return true;
    pollfd watched[] = {{worker_->descriptor(), POLLIN, 0}, {waiting_.descriptor(), POLLIN, 0}};
    const auto longest = std::min<std::chrono::milliseconds>(limit, kBetweenLooks);
    lock.unlock();
    const int count = ::poll(watched, std::size(watched), static_cast<int>(longest.count()));
    const bool is_interrupted = count < 0 && errno == EINTR;
    lock.lock();
    return !is_interrupted;
}

std::chrono::milliseconds Lane::longest_sleep() {
    const LockAndFree guard(*this);
    return has_unhandled_failures_ ? kBetweenLooks : -1ms;
}

bool Lane::is_loaded() {
    const LockAndFree guard(*this);
    std::size_t bytes = 0;
    for (const auto& [key, message] : pending_) bytes += message->bytes;
    return bytes > kLoadedBytes;
}

bool Lane::is_idle_since(std::uint64_t& waits) {
    const LockAndFree guard(*this);
    return waiting_.is_none_since(waits);
}

}  // namespace dist_prims::ucx
