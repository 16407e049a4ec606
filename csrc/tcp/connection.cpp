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
        for (std::size_t each = 0; each < std::min(kMessages, queue_.size()); ++each) {
            Unsent& unsent = queue_[each];
            if (unsent.sent < unsent.head_bytes)
                parts[count++] = {unsent.head.data() + unsent.sent, unsent.head_bytes - unsent.sent};
            const std::size_t begin = std::max(unsent.sent, unsent.head_bytes) - unsent.head_bytes;
            if (unsent.message && begin < unsent.message->bytes)
                parts[count++] = {unsent.message->data + begin, unsent.message->bytes - begin};
            asked += unsent.bytes() - unsent.sent;
        }
        const SocketResult result = write_some(socket_, parts.data(), count);
        if (!result.error.empty())
            return fail(has_sent_ ? result.error : Failure{address_ + ": " + result.error.text, result.error.number});
        has_sent_ = has_sent_ || result.bytes > 0;
        advance(result.bytes);
        if (result.bytes < asked) return;  // the kernel's buffer is full
    }
}

// Notes that the kernel has taken this many bytes.
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
    const auto found =
        std::find_if(queue_.begin(), queue_.end(), [&](const Unsent& each) { return each.message == message; });
    if (found == queue_.end()) return true;
    if (found->sent > 0) return false;
    queue_.erase(found);
    return true;
}

void OutgoingConnection::fail(const Failure& error) {
    error_ = error;
    for (const Unsent& each : queue_) {
        if (each.message) each.message->error = error;
    }
    queue_.clear();
}

void IncomingConnection::read(Inbox& inbox) {
    is_stalled_ = false;
    parse(inbox);
    for (int reads = 0; reads < kReads && !is_stalled_ && error_.empty(); ++reads) {
        // what is staged is now a part of a header at most
        std::memmove(staging_.get(), staging_.get() + first_, last_ - first_);
        last_ -= std::exchange(first_, 0);
        std::array<SocketPart, 2> parts;
        std::size_t count = 0;
        const std::size_t rest = current_ ? current_->bytes - received_ : 0;
        if (rest) parts[count++] = {current_->data + received_, rest};
        parts[count++] = {staging_.get() + last_, kStaging - last_};
        const std::size_t asked = rest + kStaging - last_;
        const SocketResult result = read_some(socket_, parts.data(), count);
        error_ = result.error;
        const std::size_t direct = std::min(rest, result.bytes);
        received_ += direct;
        last_ += result.bytes - direct;
        parse(inbox);
        if (result.bytes < asked) return;  // nothing is left for now
    }
}

// Hands out the bytes that have been read.
void IncomingConnection::parse(Inbox& inbox) {
    while (current_ || begin_message(inbox)) {
        const std::size_t bytes = std::min(current_->bytes - received_, last_ - first_);
        if (bytes) std::memcpy(current_->data + received_, staging_.get() + first_, bytes);
        received_ += bytes;
        first_ += bytes;
        if (received_ < current_->bytes) return;
        inbox.complete(*current_);
        current_ = nullptr;
        received_ = 0;
    }
}

bool IncomingConnection::begin_message(Inbox& inbox) {
    TcpHeader header;
    if (last_ - first_ < sizeof(header)) return false;
    std::memcpy(&header, staging_.get() + first_, sizeof(header));
    if (header.tag == TcpHeader::kLeave) {
        has_left_ = true;
        first_ += sizeof(header);
        return begin_message(inbox);  // a notice may follow
    }
    current_ = inbox.begin(peer_, header.tag, header.bytes);
    is_stalled_ = !current_;
    if (current_) first_ += sizeof(header);
    return current_ != nullptr;
}

}  // namespace dist_prims
