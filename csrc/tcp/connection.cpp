// A write sends several messages with one system call, and a read receives the rest of a message and what follows it: a
// system call costs more than a small message.
#include "connection.h"

#include <algorithm>
#include <cstring>

namespace dist_prims {

OutgoingConnection::OutgoingConnection(const std::string& address, const Greeting& greeting)
    : address_(address), socket_(connect_to(address)) {
    push(greeting, nullptr);
}

template <typename Head>
void OutgoingConnection::push(const Head& head, const TcpMessagePtr& message) {
    Unsent& unsent = queue_.emplace_back(Unsent{{}, sizeof(Head), message});
    std::memcpy(unsent.head.data(), &head, sizeof(Head));
}

void OutgoingConnection::push(const TcpMessagePtr& message) {
    push(TcpHeader{message->tag, 0, message->bytes}, message);
}

void OutgoingConnection::push_leave() {
    push(TcpHeader{TcpHeader::kLeave, 0, 0}, nullptr);
}

void OutgoingConnection::write() {
    constexpr std::size_t kMessages = 4;
    while (error_.empty() && !queue_.empty()) {
        std::array<SocketPart, 2 * kMessages> parts;
        std::size_t count = 0, asked = 0;
        for (std::size_t index = 0; index < std::min(kMessages, queue_.size()); ++index) {
            Unsent& unsent = queue_[index];
            if (unsent.sent < unsent.head_bytes)
                parts[count++] = {unsent.head.data() + unsent.sent, unsent.head_bytes - unsent.sent};
            const std::size_t sent_data = std::max(unsent.sent, unsent.head_bytes) - unsent.head_bytes;
            if (unsent.message && sent_data < unsent.message->bytes)
                parts[count++] = {unsent.message->data + sent_data, unsent.message->bytes - sent_data};
            asked += unsent.bytes() - unsent.sent;
        }
        const SocketResult result = write_some(socket_, parts.data(), count);
        // The error of a connection that was never established names the address.
        if (!result.error.empty())
            return fail(has_sent_ ? result.error : Failure{address_ + ": " + result.error.text, result.error.number});
        has_sent_ = has_sent_ || result.bytes > 0;
        advance(result.bytes);
        if (result.bytes < asked) return;  // the kernel's buffer is full
    }
}

// The kernel has taken this many bytes: removes what has been sent from the queue.
void OutgoingConnection::advance(std::size_t bytes) {
    while (!queue_.empty()) {
        Unsent& front = queue_.front();
        const std::size_t taken = std::min(bytes, front.bytes() - front.sent);
        front.sent += taken;
        bytes -= taken;
        if (front.sent < front.bytes()) return;
        if (front.message) front.message->is_done = true;
        queue_.pop_front();
    }
}

void OutgoingConnection::look_for_end() {
    std::byte unexpected;
    const SocketPart part{&unexpected, 1};
    const SocketResult result = read_some(socket_, &part, 1);
    if (!result.error.empty()) fail(result.error);
}

bool OutgoingConnection::withdraw(const TcpMessagePtr& message) {
    const auto entry =
        std::find_if(queue_.begin(), queue_.end(), [&](const Unsent& unsent) { return unsent.message == message; });
    if (entry == queue_.end()) return true;
    if (entry->sent > 0) return false;
    queue_.erase(entry);
    return true;
}

void OutgoingConnection::fail(const Failure& error) {
    error_ = error;
    for (const Unsent& unsent : queue_) {
        if (unsent.message) unsent.message->error = error;
    }
    queue_.clear();
}

void IncomingConnection::read(Inbox& inbox) {
    is_stalled_ = false;
    consume_staged(inbox);
    for (int reads = 0; reads < kReadsAtOnce && !is_stalled_ && error_.empty(); ++reads) {
        // 1. Of the staged bytes no more than a part of a header is left. Move it to the beginning.
        std::memmove(staging_.get(), staging_.get() + staged_begin_, staged_end_ - staged_begin_);
        staged_end_ -= std::exchange(staged_begin_, 0);
        // 2. Read the rest of the message to its place, and what follows into the staging buffer.
        std::array<SocketPart, 2> parts;
        std::size_t count = 0;
        const std::size_t rest = arrival_ ? arrival_->bytes - received_ : 0;
        if (rest) parts[count++] = {arrival_->data + received_, rest};
        parts[count++] = {staging_.get() + staged_end_, kStaging - staged_end_};
        const std::size_t asked = rest + kStaging - staged_end_;
        const SocketResult result = read_some(socket_, parts.data(), count);
        error_ = result.error;
        const std::size_t direct = std::min(rest, result.bytes);
        received_ += direct;
        staged_end_ += result.bytes - direct;
        consume_staged(inbox);
        if (result.bytes < asked) return;  // the kernel has no more bytes
    }
}

// Copies staged bytes to the messages to which they belong, and completes messages, until more bytes are needed.
void IncomingConnection::consume_staged(Inbox& inbox) {
    while (arrival_ || start_message(inbox)) {
        const std::size_t bytes = std::min(arrival_->bytes - received_, staged_end_ - staged_begin_);
        if (bytes) std::memcpy(arrival_->data + received_, staging_.get() + staged_begin_, bytes);
        received_ += bytes;
        staged_begin_ += bytes;
        if (received_ < arrival_->bytes) return;
        inbox.complete(*arrival_);
        arrival_ = nullptr;
        received_ = 0;
    }
}

// Takes a header from the staged bytes, and asks the inbox where its message goes. Returns false if that is not
// possible yet: a part of the header is missing, or the inbox does not accept the message.
bool IncomingConnection::start_message(Inbox& inbox) {
    TcpHeader header;
    if (staged_end_ - staged_begin_ < sizeof(header)) return false;
    std::memcpy(&header, staging_.get() + staged_begin_, sizeof(header));
    if (header.tag == TcpHeader::kLeave) {
        has_left_ = true;
        staged_begin_ += sizeof(header);
        return start_message(inbox);  // a notice may follow
    }
    arrival_ = inbox.begin(peer_, header.tag, header.bytes);
    is_stalled_ = !arrival_;
    if (arrival_) staged_begin_ += sizeof(header);
    return arrival_ != nullptr;
}

}  // namespace dist_prims
