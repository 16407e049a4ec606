// The threads of the program, through RemotePeers, call the functions of the interface, which pass a message to the
// lane of its tag. run() and the functions below it belong to the transport's own thread, which sleeps in poll().
#include "transport.h"

#include <poll.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "lane_request.h"

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr auto kTimeToGreet = 30s;  // a connection without a greeting is then closed
constexpr auto kTimeToLeave = 1s;   // passes only where a peer does not read
constexpr std::size_t kMaxNewcomers = 1024;
constexpr std::chrono::milliseconds kNoLimit{-1};  // as poll() takes it
constexpr std::chrono::milliseconds kRetry = 1s;   // between two attempts to accept, and before a refusal is reported

}  // namespace

TcpTransport::TcpTransport(TcpEndpoint endpoint, int rank, OnClose on_close, TcpLane::OnGone on_gone)
    : endpoint_(std::move(endpoint)),
      rank_(rank),
      on_close_(std::move(on_close)),
      data_([this](int peer) { return connect(peer, kData); }, endpoint_.polls),
      control_([this](int peer) { return connect(peer, kControl); }, false, std::move(on_gone)) {
    mover_.start("rank " + std::to_string(rank) + ": the thread of the transport over TCP", [this] { run(); });
}

TcpTransport::~TcpTransport() {
    mover_.stop();
}

OutgoingConnection TcpTransport::connect(int peer, LaneKind kind) const {
    return {endpoint_.addresses.at(static_cast<std::size_t>(peer)), Greeting(rank_, peer, kind, endpoint_.key)};
}

Transport::Handle TcpTransport::send(int to, int tag, const std::byte* data, std::size_t bytes, Owner owner) {
    auto* const memory = const_cast<std::byte*>(data);  // a send only reads it
    return post({true, to, tag, memory, bytes, std::move(owner)});
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

Transport::Handle TcpTransport::post(TcpMessage message) {
    message.may_be_shorter = tags_.may_be_shorter(message.tag);
    // A user may only ask at intervals whether a receive is done, without a thread that waits for it.
    message.reads_ahead = message.tag <= tags_.largest_of_users();
    TcpLane& lane = lane_of(message.tag);
    const auto posted = std::make_shared<TcpMessage>(std::move(message));
    posted->is_outgoing ? lane.send(posted) : lane.receive(posted);
    return std::make_unique<LaneRequest<TcpLane, TcpMessagePtr>>(*this, lane, posted);
}

void TcpTransport::close(const std::string& reason) {
    data_.close(reason);
    control_.close(reason);
    if (on_close_) on_close_(reason);
}

Transport::FailedPeer TcpTransport::failed_peer() {
    const FailedPeer of_data = data_.failed_peer();
    return of_data.rank == kAnyone ? control_.failed_peer() : of_data;
}

std::vector<int> TcpTransport::unanswering() {
    std::set<int> ranks = data_.unanswering();
    ranks.merge(control_.unanswering());
    return {ranks.begin(), ranks.end()};
}

std::string TcpTransport::refusal(bool now) {
    if (now ? is_refusing_ : is_exhausted_) return "accept(): Too many open files";
    const std::string refusal = data_.refusal();
    return refusal.empty() ? control_.refusal() : refusal;
}

void TcpTransport::leave() {
    data_.leave(kTimeToLeave);
    control_.leave(kTimeToLeave);
}

void TcpTransport::move_in_background() {
    if (data_.is_loaded()) mover_.ask();
}

// The body of the transport's thread.
void TcpTransport::run() {
    while (!mover_.is_stopping()) {
        // 1. Sleep until a descriptor is readable, or until it is time to look again whether other threads wait.
        const bool moves_data = mover_.moves();  // this thread moves the messages of the data lane
        std::vector<pollfd> watched{{mover_.descriptor(), POLLIN, 0},
                                    {may_accept_ ? endpoint_.listening.descriptor() : -1, POLLIN, 0},
                                    {control_.descriptor(), POLLIN, 0},
                                    {moves_data ? data_.descriptor() : -1, POLLIN, 0}};
        for (const Newcomer& newcomer : newcomers_) watched.push_back({newcomer.socket.descriptor(), POLLIN, 0});
        auto sleep = moves_data ? kNoLimit : mover_.until_look();
        if (moves_data && !(newcomers_.empty() && may_accept_)) sleep = kRetry;
        ::poll(watched.data(), watched.size(), static_cast<int>(sleep.count()));
        if (mover_.is_stopping()) return;
        // 2. Accept connections, and move the messages of the control lane.
        if (watched[1].revents || !may_accept_) accept_newcomers();
        if (watched[2].revents) control_.progress();
        if (!newcomers_.empty()) read_greetings();
        // 3. Move the messages of the data lane, unless another thread has begun to wait for them.
        mover_.look(data_, watched[0].revents != 0);
        if (moves_data && mover_.moves() && watched[3].revents) data_.progress();
    }
}

void TcpTransport::accept_newcomers() {
    try {
        while ((may_accept_ = newcomers_.size() < kMaxNewcomers)) {
            std::optional<Socket> accepted = accept_from(endpoint_.listening);
            refuses_since_ = {};
            is_refusing_ = is_exhausted_ = false;
            if (!accepted) return;
            newcomers_.push_back({std::move(*accepted), TcpLane::Clock::now()});
        }
    } catch (const std::system_error&) {  // no descriptor is left; some may be closed soon
        // accept() fails for want of a descriptor even if no connection waits. Only a waiting connection is refused.
        pollfd listening{endpoint_.listening.descriptor(), POLLIN, 0};
        may_accept_ = ::poll(&listening, 1, 0) == 0;
        const auto now = TcpLane::Clock::now();
        if (may_accept_)
            refuses_since_ = {};
        else if (refuses_since_ == TcpLane::Clock::time_point{})
            refuses_since_ = now;
        is_refusing_ = !may_accept_;
        is_exhausted_ = is_refusing_ && now - refuses_since_ >= kRetry;
    }
}

// A newcomer whose greeting is over, or late, is removed. Its socket is then closed, unless a lane has taken it.
void TcpTransport::read_greetings() {
    const auto earliest = TcpLane::Clock::now() - kTimeToGreet;
    newcomers_.remove_if(
        [&](Newcomer& newcomer) { return !awaits_greeting(newcomer) || newcomer.accepted_at < earliest; });
}

// Reads what has come of a greeting. If the greeting is complete and valid, its lane takes the connection. Returns
// whether more of the greeting may come.
bool TcpTransport::awaits_greeting(Newcomer& newcomer) {
    auto* const memory = reinterpret_cast<std::byte*>(&newcomer.greeting);
    const SocketPart rest{memory + newcomer.greeting_bytes, sizeof(Greeting) - newcomer.greeting_bytes};
    const SocketResult result = read_some(newcomer.socket, &rest, 1);
    newcomer.greeting_bytes += result.bytes;
    if (newcomer.greeting_bytes < sizeof(Greeting)) return result.error.empty();
    const Greeting& greeting = newcomer.greeting;
    if (greeting.is_valid(rank_, endpoint_.key, static_cast<int>(endpoint_.addresses.size()), kLanes))
        (greeting.lane == kData ? data_ : control_).add(greeting.rank, std::move(newcomer.socket));
    return false;
}

}  // namespace dist_prims
