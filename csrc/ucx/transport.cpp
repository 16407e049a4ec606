#include "transport.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <system_error>
#include <utility>

#include "../common/thread.h"

namespace dist_prims::ucx {
namespace {

using namespace std::chrono_literals;

// How often the thread looks whether other threads still wait: at first, and at most.
constexpr std::chrono::milliseconds kFirstLook = 2ms, kLastLook = 64ms;
constexpr const char* kLate = "the time limit of a message has passed";

}  // namespace

// A message of this transport as a request of it.
class UcxTransport::Handled : public TransportRequest {
public:
    Handled(UcxTransport& transport, MessagePtr message) : transport_(transport), message_(std::move(message)) {}
    ~Handled() override { transport_.lane_.release(message_); }

    bool wait(std::chrono::milliseconds limit) override {
        const Lane::WaitResult result = transport_.lane_.wait(*message_, limit);
        if (result == Lane::WaitResult::kLate) {
            transport_.control_.close(kLate);  // which closes the lane
            throw TransportError(kLate);
        }
        return result == Lane::WaitResult::kDone;
    }
    bool is_done() override { return transport_.lane_.is_done(*message_); }
    void abort() override { transport_.lane_.abort(*message_); }
    int source() override { return transport_.lane_.source(*message_); }

private:
    UcxTransport& transport_;
    const MessagePtr message_;
};

UcxTransport::UcxTransport(std::unique_ptr<Worker> worker, Connections connections)
    : tags_(TcpTransport::kLargestTag),
      is_watched_(connections.addresses.size()),
      lane_(std::move(worker), std::move(connections.addresses), connections.rank, connections.tcp.key,
            connections.tcp.polls),
      control_(
          std::move(connections.tcp), connections.rank, [this] { lane_.close(kLate); },
          [this](int peer, const Failure& failure) { lane_.on_gone(peer, failure); }),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (wake_.descriptor() < 0) throw std::system_error(errno, std::generic_category(), "eventfd()");
    thread_ = start_thread("rank " + std::to_string(connections.rank) + ": the thread of the transport over UCX",
                           [this] { run(); });
}

UcxTransport::~UcxTransport() {
    stop();
}

void UcxTransport::stop() {
    if (is_stopping_.exchange(true)) return;
    ::eventfd_write(wake_.descriptor(), 1);
    thread_.join();
    lane_.close("the transport has been closed");
}

// The end of a rank with which this one exchanges messages must be noticed.
void UcxTransport::watch(int peer) {
    auto& is_watched = is_watched_[static_cast<std::size_t>(peer)];
    if (!is_watched.load(std::memory_order_relaxed) && !is_watched.exchange(true)) control_.watch(peer);
}

Transport::Handle UcxTransport::send(int to, int tag, const std::byte* data, std::size_t bytes, Owner owner) {
    if (tags_.is_control(tag)) return control_.send(to, tag, data, bytes, std::move(owner));
    watch(to);
    auto* const place = const_cast<std::byte*>(data);  // a send only reads it
    const auto message = std::make_shared<Message>(Message{&lane_, true, to, tag, place, bytes, std::move(owner)});
    lane_.send(message);
    return std::make_unique<Handled>(*this, message);
}

Transport::Handle UcxTransport::receive(int from, int tag, std::byte* data, std::size_t bytes, Owner owner) {
    if (tags_.is_control(tag)) return control_.receive(from, tag, data, bytes, std::move(owner));
    if (from != kAnyone) watch(from);
    const auto message = std::make_shared<Message>(
        Message{&lane_, false, from, tag, data, bytes, std::move(owner), tags_.is_agreement(tag)});
    lane_.receive(message);
    return std::make_unique<Handled>(*this, message);
}

Transport::Handle UcxTransport::receive_from_any(int tag, std::byte* data, std::size_t bytes, Owner owner,
                                                 const ClaimPtr& claim) {
    const auto message = std::make_shared<Message>(Message{&lane_, false, kAnyone, tag, data, bytes, std::move(owner)});
    message->claim = claim;
    lane_.receive(message);
    return std::make_unique<Handled>(*this, message);
}

void UcxTransport::leave() {
    lane_.leave();
    control_.leave();
}

void UcxTransport::move_in_background() {
    if (!lane_.is_loaded() || is_asked_to_move_.exchange(true)) return;
    ::eventfd_write(wake_.descriptor(), 1);
}

void UcxTransport::run() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, nullptr);  // signals are for the threads of the program
    bool moves = true;                            // this thread, rather than one that waits
    std::uint64_t waits = 0;
    eventfd_t count = 0;
    for (std::chrono::milliseconds look = kFirstLook; !is_stopping_;) {
        const bool is_quiet = !moves || lane_.progress();
        pollfd watched[] = {{wake_.descriptor(), POLLIN, 0}, {moves ? lane_.descriptor() : -1, POLLIN, 0}};
        const auto sleep = !is_quiet ? 0ms : moves ? lane_.longest_sleep() : look;
        ::poll(watched, std::size(watched), static_cast<int>(sleep.count()));
        if (watched[0].revents) ::eventfd_read(wake_.descriptor(), &count);
        const bool is_asked = is_asked_to_move_.exchange(false);
        const bool is_idle = lane_.is_idle_since(waits) || is_asked;
        look = std::exchange(moves, is_idle) == is_idle ? std::min<std::chrono::milliseconds>(2 * look, kLastLook)
                                                        : kFirstLook;
    }
}

}  // namespace dist_prims::ucx
