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
        std::array<SocketPart, 3 * kMessages> parts;
        std::size_t count = 0, asked = 0;
        for (std::size_t index = 0; index < std::min(kMessages, queue_.size()); ++index) {
            Unsent& unsent = queue_[index];
            std::size_t sent = unsent.sent;
            for (const SocketPart& part : unsent.parts()) {
                const std::size_t skipped = std::min(sent, part.bytes);
                if (skipped < part.bytes)
                    parts[count++] = {static_cast<std::byte*>(part.data) + skipped, part.bytes - skipped};
                sent -= skipped;
            }
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

IncomingConnection::IncomingConnection(Socket socket, int peer)
    : socket_(std::move(socket)), peer_(peer), staging_(new std::byte[kStaging]) {
    wake_from(socket_, kTrailerBytes + 1);
}

void IncomingConnection::read(Inbox& inbox, bool may_leave_trailer) {
    is_stalled_ = false;
    consume_staged(inbox);
    for (int reads = 0; reads < kReadsAtOnce && !is_stalled_ && error_.empty(); ++reads) {
        // 1. Of the staged bytes no more than a trailer and a part of a header is left. Move it to the beginning.
        std::memmove(staging_.get(), staging_.get() + staged_begin_, staged_end_ - staged_begin_);
        staged_end_ -= std::exchange(staged_begin_, 0);
        // 2. Read the rest of the message to its place, and what follows into the staging buffer: all, or a message as
        // long as the last one, whose trailer is left.
        std::array<SocketPart, 2> parts;
        std::size_t count = 0;
        const std::size_t rest = arrival_ ? arrival_->bytes - received_ : 0;
        if (rest) parts[count++] = {arrival_->data + received_, rest};
        const bool leaves_trailer =
            may_leave_trailer && !arrival_ && last_bytes_ <= kSmall && unread_trailers_ < kMostUnread;
        const std::size_t most_staged = leaves_trailer ? kTrailerBytes + sizeof(TcpHeader) + last_bytes_ : kStaging;
        parts[count++] = {staging_.get() + staged_end_, most_staged - staged_end_};
        const std::size_t asked = rest + most_staged - staged_end_;
        const SocketResult result = read_some(socket_, parts.data(), count);
        error_ = result.error;
        const std::size_t direct = std::min(rest, result.bytes);
        received_ += direct;
        staged_end_ += result.bytes - direct;
        unread_trailers_ = leaves_trailer ? unread_trailers_ + 1 : 0;
        consume_staged(inbox);
        // 3. Return if the kernel has no more bytes, or this was a whole message.
        if (result.bytes < asked || (leaves_trailer && !arrival_ && staged_begin_ == staged_end_)) return;
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
        last_bytes_ = arrival_->bytes;
        arrival_ = nullptr;
        received_ = 0;
    }
}

// Takes a trailer and a header from the staged bytes, and asks the inbox where the message goes. Returns false if that
// is not possible yet: a part of the header is missing, or the inbox does not accept the message.
bool IncomingConnection::start_message(Inbox& inbox) {
    TcpHeader header;
    constexpr std::size_t kHeadBytes = kTrailerBytes + sizeof(header);
    if (staged_end_ - staged_begin_ < kHeadBytes) return false;
    std::memcpy(&header, staging_.get() + staged_begin_ + kTrailerBytes, sizeof(header));
    if (header.tag == TcpHeader::kLeave) {
        has_left_ = true;
        staged_begin_ += kHeadBytes;
        return start_message(inbox);  // a notice may follow
    }
    arrival_ = inbox.begin(peer_, header.tag, header.bytes);
    is_stalled_ = !arrival_;
    if (arrival_) staged_begin_ += kHeadBytes;
    return arrival_ != nullptr;
}

}  // namespace dist_prims
