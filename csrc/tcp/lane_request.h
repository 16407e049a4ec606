// A message of a lane, as the interface Transport hands it out. UCX has lanes of its own, and uses this class, too.
#pragma once

#include <chrono>
#include <string>
#include <utility>

#include "transport.h"

namespace dist_prims {

template <typename Lane, typename MessagePtr>
class LaneRequest : public Transport::TransportRequest {
public:
    // `transport` is closed when the time limit of a wait has passed. UCX passes the transport of its control lane.
    LaneRequest(TcpTransport& transport, Lane& lane, MessagePtr message)
        : transport_(transport), lane_(lane), message_(std::move(message)) {}
    ~LaneRequest() override { lane_.release(message_); }

    bool wait(std::chrono::milliseconds limit) override {
        const typename Lane::WaitResult result = lane_.wait(*message_, limit);
        if (result == Lane::WaitResult::kLate) {
            const std::string reason = "the time limit of a message has passed";
            transport_.close(reason);
            throw Transport::TransportError(reason);
        }
        return result == Lane::WaitResult::kDone;
    }
    bool is_done() override { return lane_.is_done(*message_); }
    void abort() override { lane_.abort(*message_); }
    int source() override { return lane_.source(*message_); }

private:
    TcpTransport& transport_;
    Lane& lane_;
    const MessagePtr message_;
};

}  // namespace dist_prims
