#include "link_costs.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

namespace dist_prims {
namespace {

constexpr int kEchoes = 6, kBlocks = 3;
constexpr std::size_t kFirstBlock = 64 << 10, kLargestBlock = 4 << 20;
// Blocks grow until all of them together have taken this many seconds, and the last one this many times an echo.
constexpr double kLongEnough = 20e-3, kLongEnoughInEchoes = 4;
constexpr double kAlphaUnit = 1e-9, kBetaUnit = 1e-15;

// The messages of one measurement. Nothing else is sent under this tag before the first collective of the group. Each
// message has an owner, because after an error the transport may still need its memory.
class LinkMessages {
public:
    LinkMessages(RemotePeers& remote, int peer, std::chrono::milliseconds timeout)
        : remote_(remote), peer_(peer), timeout_(timeout) {}

    void send(const std::byte* data, std::size_t bytes, const Transport::Owner& owner) {
        remote_.wait(remote_.send(peer_, remote_.tags.data(0), data, bytes, timeout_, owner));
    }
    void receive(std::byte* data, std::size_t bytes, const Transport::Owner& owner) {
        remote_.wait(remote_.receive(peer_, remote_.tags.data(0), data, bytes, timeout_, owner));
    }
    void send(std::uint64_t number) {
        const auto message = std::make_shared<std::uint64_t>(number);
        send(reinterpret_cast<const std::byte*>(message.get()), sizeof(number), message);
    }
    std::uint64_t receive() {
        const auto message = std::make_shared<std::uint64_t>();
        receive(reinterpret_cast<std::byte*>(message.get()), sizeof(*message), message);
        return *message;
    }

private:
    RemotePeers& remote_;
    const int peer_;
    const std::chrono::milliseconds timeout_;
};

// The least seconds of several runs: other processes make some of them take longer.
template <typename Work>
double least_seconds_of(int runs, const Work& work) {
    std::chrono::duration<double> least = std::chrono::hours(1);
    for (int run = 0; run < runs; ++run) {
        const auto began = Clock::now();
        work();
        least = std::min<std::chrono::duration<double>>(least, Clock::now() - began);
    }
    return least.count();
}

std::uint64_t in_units(double value, double unit) {
    return static_cast<std::uint64_t>(std::clamp(std::round(value / unit), 1.0, double{UINT32_MAX}));
}

}  // namespace

std::uint64_t LinkCosts::packed() const {
    return in_units(alpha, kAlphaUnit) << 32 | in_units(beta, kBetaUnit);
}

LinkCosts LinkCosts::unpacked(std::uint64_t packed) {
    return {static_cast<double>(packed >> 32) * kAlphaUnit, static_cast<double>(packed & UINT32_MAX) * kBetaUnit};
}

LinkCosts measure_link(RemotePeers& remote, int peer, std::uint64_t network, std::chrono::milliseconds timeout) {
    // 1. Is there a link between the two?
    LinkMessages messages(remote, peer, timeout);
    messages.send(network);
    if (messages.receive() == network) return {};
    // 2. An echo takes twice the latency of a message.
    const double echo = least_seconds_of(kEchoes, [&] {
        messages.send(1);
        messages.receive();
    });
    // 3. A block and its acknowledgement take an echo, and the time of the bytes of the block.
    const auto block = std::make_shared<const std::vector<std::byte>>(kLargestBlock);
    std::vector<double> betas;
    const auto began = Clock::now();
    for (std::size_t bytes = kFirstBlock; bytes <= kLargestBlock; bytes *= 2) {
        const double spent = least_seconds_of(kBlocks, [&] {
            messages.send(bytes);
            messages.send(block->data(), bytes, block);
            messages.receive();
        });
        // If the echoes were delayed and the block was not, the whole time of the block is the best estimate.
        betas.push_back((spent > echo ? spent - echo : spent) / static_cast<double>(bytes));
        const std::chrono::duration<double> all = Clock::now() - began;
        if (all.count() > kLongEnough && spent > kLongEnoughInEchoes * echo) break;
    }
    messages.send(0);  // no further block
    // The largest blocks are the most precise.
    const std::size_t last = std::min<std::size_t>(betas.size(), 2);
    return {echo / 2, *std::min_element(betas.end() - static_cast<std::ptrdiff_t>(last), betas.end())};
}

void help_measure_link(RemotePeers& remote, int peer, std::uint64_t network, std::chrono::milliseconds timeout) {
    LinkMessages messages(remote, peer, timeout);
    const std::uint64_t theirs = messages.receive();
    messages.send(network);
    if (theirs == network) return;
    for (int echo = 0; echo < kEchoes; ++echo) messages.send(messages.receive());
    const auto block = std::make_shared<std::vector<std::byte>>(kLargestBlock);
    while (const std::uint64_t bytes = messages.receive()) {
        messages.receive(block->data(), static_cast<std::size_t>(bytes), block);
        messages.send(bytes);
    }
}

}  // namespace dist_prims
