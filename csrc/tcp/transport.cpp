#include "transport.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <system_error>
#include <utility>

#include "../common/thread.h"

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr auto kTimeToGreet = 30s;
constexpr auto kTimeToLeave = 1s;  // passes only where a peer does not read
constexpr std::size_t kMaxNewcomers = 1024;
// How often the thread looks whether other threads still wait for the data lane: at first, and at most.
constexpr std::chrono::milliseconds kFirstLook = 2ms, kLastLook = 64ms;
constexpr std::chrono::milliseconds kNoLimit{-1}, kRetry = 1s;

}  // namespace

// A message of this transport as a request of it.
class TcpTransport::Handled : public TransportRequest {
public:
    Handled(TcpTransport& transport, TcpLane& lane, TcpMessagePtr message)
        : transport_(transport), lane_(lane), message_(std::move(message)) {}
    ~Handled() override { lane_.release(message_); }

    bool wait(std::chrono::milliseconds limit) override {
        const TcpLane::WaitResult result = lane_.wait(*message_, limit);
        if (result == TcpLane::WaitResult::kLate) {
            const std::string reason = "the time limit of a message has passed";
            transport_.close(reason);
            throw TransportError(reason);
        }
        return result == TcpLane::WaitResult::kDone;
    }
    bool is_done() override { return lane_.is_done(*message_); }
    void abort() override { lane_.abort(*message_); }
    int source() override { return lane_.source(*message_); }

private:
    TcpTransport& transport_;
    TcpLane& lane_;
    const TcpMessagePtr message_;
};

TcpTransport::TcpTransport(TcpEndpoint endpoint, int rank, std::function<void()> on_close, TcpLane::OnGone on_gone)
    : endpoint_(std::move(endpoint)),
      rank_(rank),
      on_close_(std::move(on_close)),
      data_([this](int peer) { return connect(peer, kData); }, endpoint_.polls),
      control_([this](int peer) { return connect(peer, kControl); }, false, std::move(on_gone)),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (wake_.descriptor() < 0) throw std::system_error(errno, std::generic_category(), "eventfd()");
    thread_ =
        start_thread("rank " + std::to_string(rank) + ": the thread of the transport over TCP", [this] { run(); });
}

TcpTransport::~TcpTransport() {
    is_stopping_ = true;
    ::eventfd_write(wake_.descriptor(), 1);
    thread_.join();
}

OutgoingConnection TcpTransport::connect(int peer, LaneKind kind) const {
    return {endpoint_.addresses.at(static_cast<std::size_t>(peer)), Greeting(rank_, peer, kind, endpoint_.key)};
}

Transport::Handle TcpTransport::send(int to, int tag, const std::byte* data, std::size_t bytes, Owner owner) {
    auto* const place = const_cast<std::byte*>(data);  // a send only reads it
    const auto message = std::make_shared<TcpMessage>(TcpMessage{true, to, tag, place, bytes, std::move(owner)});
    TcpLane& lane = lane_of(tag);
    lane.send(message);
    return std::make_unique<Handled>(*this, lane, message);
}

Transport::Handle TcpTransport::receive(int from, int tag, std::byte* data, std::size_t bytes, Owner owner) {
    return post({false, from, tag, data, bytes, std::move(owner)});
}

Transport::Handle TcpTransport::receive_from_any(int tag, std::byte* data, std::size_t bytes, Owner owner,
                                                 const ClaimPtr& claim) {
    TcpMessage receive{false, kAnyone, tag, data, bytes, std::move(owner)};
    receive.claim = claim;
    return post(std::move(receive));
}

Transport::Handle TcpTransport::post(TcpMessage receive) {
    receive.may_be_shorter = tags_.is_agreement(receive.tag);
    receive.reads_ahead = receive.tag <= tags_.largest_of_users();  // a user may only ask whether it is done
    const auto message = std::make_shared<TcpMessage>(std::move(receive));
    TcpLane& lane = lane_of(message->tag);
    lane.receive(message);
    return std::make_unique<Handled>(*this, lane, message);
}

void TcpTransport::close(const std::string& reason) {
    data_.close(reason);
    control_.close(reason);
    if (on_close_) on_close_();
}

int TcpTransport::dead_rank() {
    return std::max(data_.dead_rank(), control_.dead_rank());
}

std::vector<int> TcpTransport::unanswering() {
    std::set<int> found = data_.unanswering();
    found.merge(control_.unanswering());
    return {found.begin(), found.end()};
}

std::string TcpTransport::refusal() {
    return is_exhausted_ ? "accept(): Too many open files" : "";
}

void TcpTransport::leave() {
    data_.leave(kTimeToLeave);
    control_.leave(kTimeToLeave);
}

void TcpTransport::move_in_background() {
    if (!data_.is_loaded() || is_asked_to_move_.exchange(true)) return;
    ::eventfd_write(wake_.descriptor(), 1);
}

void TcpTransport::run() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, nullptr);  // signals are for the threads of the program
    bool has_data = true;                         // this thread moves the messages of the data lane
    std::uint64_t waits = 0;
    eventfd_t count = 0;
    for (std::chrono::milliseconds look = kFirstLook; !is_stopping_;) {
        std::vector<pollfd> watched{{wake_.descriptor(), POLLIN, 0},
                                    {may_accept_ ? endpoint_.listening.descriptor() : -1, POLLIN, 0},
                                    {control_.descriptor(), POLLIN, 0},
                                    {has_data ? data_.descriptor() : -1, POLLIN, 0}};
        for (const Newcomer& each : newcomers_) watched.push_back({each.socket.descriptor(), POLLIN, 0});
        auto sleep = has_data ? kNoLimit : look;
        if (has_data && !(newcomers_.empty() && may_accept_)) sleep = kRetry;
        ::poll(watched.data(), watched.size(), static_cast<int>(sleep.count()));
        if (is_stopping_) return;
        if (watched[0].revents) ::eventfd_read(wake_.descriptor(), &count);
        if (watched[1].revents || !may_accept_) accept();
        if (watched[2].revents) control_.progress();
        if (!newcomers_.empty()) read_greetings();
        const bool is_asked = is_asked_to_move_.exchange(false);
        const bool is_idle = data_.is_idle_since(waits) || is_asked;
        if (has_data && is_idle && watched[3].revents) data_.progress();
        look = std::exchange(has_data, is_idle) == is_idle ? std::min<std::chrono::milliseconds>(2 * look, kLastLook)
                                                           : kFirstLook;
    }
}

void TcpTransport::accept() {
    try {
        while ((may_accept_ = newcomers_.size() < kMaxNewcomers)) {
            std::optional<Socket> accepted = accept_from(endpoint_.listening);
            refuses_since_ = {};
            is_exhausted_ = false;
            if (!accepted) return;
            newcomers_.push_back({std::move(*accepted), TcpLane::Clock::now()});
        }
    } catch (const std::system_error&) {  // too many descriptors: some may be closed soon
        pollfd newcomer{endpoint_.listening.descriptor(), POLLIN, 0};
        may_accept_ = ::poll(&newcomer, 1, 0) == 0;  // the kernel looks for a descriptor before it looks for newcomers
        const auto now = TcpLane::Clock::now();
        if (may_accept_)
            refuses_since_ = {};
        else if (refuses_since_ == TcpLane::Clock::time_point{})
            refuses_since_ = now;
        is_exhausted_ = !may_accept_ && now - refuses_since_ >= kRetry;
    }
}

void TcpTransport::read_greetings() {
    const auto latest = TcpLane::Clock::now() - kTimeToGreet;
    newcomers_.remove_if([&](Newcomer& each) { return !read_greeting(each) || each.since < latest; });
}

// Returns false when the greeting has been dealt with, or will not come.
bool TcpTransport::read_greeting(Newcomer& newcomer) {
    auto* const bytes = reinterpret_cast<std::byte*>(&newcomer.greeting);
    const SocketPart rest{bytes + newcomer.bytes, sizeof(Greeting) - newcomer.bytes};
    const SocketResult result = read_some(newcomer.socket, &rest, 1);
    newcomer.bytes += result.bytes;
    if (newcomer.bytes < sizeof(Greeting)) return result.error.empty();
    const Greeting& greeting = newcomer.greeting;
    if (greeting.is_valid(rank_, endpoint_.key, static_cast<int>(endpoint_.addresses.size()), kLanes))
        (greeting.lane == kData ? data_ : control_).add(greeting.rank, std::move(newcomer.socket));
    return false;
}

}  // namespace dist_prims
