#include "transport.h"

#include <utility>

#include "message.h"
#include "progress.h"

namespace dist_prims::mpi {
namespace {

class MessageRequest : public Transport::TransportRequest {
public:
    explicit MessageRequest(std::shared_ptr<MpiMessage> message) : message_(std::move(message)) {}
    ~MessageRequest() override { message_->release(); }

    bool wait(std::chrono::milliseconds limit) override { return message_->wait(limit); }
    bool is_done() override { return message_->test(); }
    void abort() override { message_->abort(); }
    int source() override { return message_->source(); }

private:
    const std::shared_ptr<MpiMessage> message_;
};

}  // namespace

// Progress takes the lock of MPI when it is made, and messages call it under that lock.
MpiTransport::MpiTransport(std::shared_ptr<Communicator> communicator)
    : communicator_(std::move(communicator)), tags_(communicator_->largest_tag()) {
    Progress::instance();
}

Transport::Handle MpiTransport::send(int to, int tag, const std::byte* data, std::size_t bytes, Owner owner) {
    const auto message = std::make_shared<MpiMessage>(communicator_, std::move(owner));
    message->send(to, tag, data, bytes);
    return std::make_unique<MessageRequest>(message);
}

Transport::Handle MpiTransport::receive(int from, int tag, std::byte* data, std::size_t bytes, Owner owner) {
    const auto message = std::make_shared<MpiMessage>(communicator_, std::move(owner));
    message->receive(from, tag, data, bytes, tags_.may_be_shorter(tag));
    return std::make_unique<MessageRequest>(message);
}

}  // namespace dist_prims::mpi
