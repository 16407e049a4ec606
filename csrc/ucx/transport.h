// The messages between hosts through UCX: over TCP, over several rails, or over RDMA where there is any.
//
// UCX carries the data. Notices and diagnosis (see net/tags.h) travel over the TCP transport of this library, which
// also tells that a rank has gone: the kernel closes the connections of a process that ends. UCX alone would notice
// that late over RDMA, where there is no connection to close, and a notice would share a queue with data that is stuck.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "../net/tags.h"
#include "lane.h"
#include "library.h"

namespace dist_prims::ucx {

class UcxTransport : public Transport {
public:
    UcxTransport(std::unique_ptr<Worker> worker, Connections connections);
    ~UcxTransport() override;
    UcxTransport(const UcxTransport&) = delete;

    int largest_tag() const override { return control_.largest_tag(); }
    Handle send(int to, int tag, const std::byte* data, std::size_t bytes, Owner owner) override;
    Handle receive(int from, int tag, std::byte* data, std::size_t bytes, Owner owner) override;
    Handle receive_from_any(int tag, std::byte* data, std::size_t bytes, Owner owner, const ClaimPtr& claim) override;
    void progress() override { lane_.progress(); }
    void move_in_background() override;
    FailedPeer failed_peer() override { return control_.failed_peer(); }
    std::vector<int> unanswering() override { return control_.unanswering(); }
    std::string refusal(bool now) override { return control_.refusal(now); }
    void leave() override;

    // Fails all messages and stops the thread: UCX is not called any more.
    void stop();

private:
    void watch(int peer);
    void run();

    const Tags tags_;
    std::vector<std::atomic<bool>> is_watched_;  // by rank
    Lane lane_;
    TcpTransport control_;  // its thread calls the lane

    BackgroundMover mover_;
};

}  // namespace dist_prims::ucx
