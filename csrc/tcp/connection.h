// The connections of a lane, which calls them under its lock. The rank that opens a connection sends on it; the other
// rank sends nothing:
//
//     greeting | trailer, header, data | trailer, header, data | ... | trailer
//
// The greeting is read before there is an IncomingConnection (see transport.h). A header with the tag kLeave, without
// data, marks that the rank leaves the group. Only notices follow it.
//
// A trailer is a byte without meaning, which is sent with the bytes before it. A read that takes the last byte of the
// kernel's buffer makes the kernel acknowledge small messages by a packet, and takes a quarter of the time of a small
// call for that. A thread that polls therefore leaves the trailer in the buffer, so that an acknowledgement stands for
// several messages. It reads the trailer before it sleeps: the sender may wait for the acknowledgement.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "greeting.h"
#include "inbox.h"
#include "socket.h"

namespace dist_prims {

constexpr std::size_t kTrailerBytes = 1;

struct TcpHeader {
    std::int32_t tag, unused;
    std::uint64_t bytes;
    static constexpr std::int32_t kLeave = -1;  // as tag: the rank leaves the group
};

class OutgoingConnection {
public:
    // Begins to connect. Throws std::system_error if that fails at once, as without a free descriptor.
    OutgoingConnection(const std::string& address, const Greeting& greeting);

    // Adds a message to the queue of what write() sends.
    void push(const TcpMessagePtr& message);
    // Adds the mark that this rank leaves the group: the peer does not take the end of the connection for a death then.
    void push_leave();
    // Gives the kernel as many bytes as it takes. A message is done when the kernel has taken all of it.
    void write();
    // Checks whether the peer has closed the connection.
    void look_for_end();
    // Removes a message from the queue. Returns false if a part of it has been sent: then it stays.
    bool withdraw(const TcpMessagePtr& message);
    // Ends the connection: all messages in the queue fail.
    void fail(const Failure& error);

    bool has_unsent() const { return !queue_.empty(); }
    bool is_unanswered() const { return dist_prims::is_unanswered(socket_); }
    Transport::Delivered delivered() const { return dist_prims::delivered(socket_); }
    const Failure& error() const { return error_; }  // empty as long as the connection is open
    int descriptor() const { return socket_.descriptor(); }

private:
    static constexpr std::size_t kHead = sizeof(Greeting) > sizeof(TcpHeader) ? sizeof(Greeting) : sizeof(TcpHeader);
    // An entry of the queue, of which a part may have been sent: a head, the data of a message, and a trailer.
    struct Unsent {
        std::array<std::byte, kHead> head;  // a greeting or a header
        std::size_t head_bytes;
        TcpMessagePtr message;  // null after a greeting, or the mark that the rank leaves
        std::size_t sent = 0;   // bytes of head, data and trailer
        std::byte trailer{};

        std::array<SocketPart, 3> parts() {
            const SocketPart data = message ? SocketPart{message->data, message->bytes} : SocketPart{};
            return {{{head.data(), head_bytes}, data, {&trailer, kTrailerBytes}}};
        }
        std::size_t bytes() const { return head_bytes + (message ? message->bytes : 0) + kTrailerBytes; }
    };

    template <typename Head>
    void push(const Head& head, const TcpMessagePtr& message);
    void advance(std::size_t bytes);

    const std::string address_;
    Socket socket_;
    std::deque<Unsent> queue_;
    bool has_sent_ = false;  // false: an error names the address
    Failure error_;
};

class IncomingConnection {
public:
    IncomingConnection(Socket socket, int peer);

    // Reads what has come, up to a message that the inbox does not accept yet. The connection has stalled then.
    // `may_leave_trailer`: the caller polls, and calls again with false before it sleeps.
    void read(Inbox& inbox, bool may_leave_trailer);

    bool has_unread_trailer() const { return unread_trailers_ > 0; }
    bool is_stalled() const { return is_stalled_; }
    bool has_left() const { return has_left_; }      // the peer has sent kLeave
    const Failure& error() const { return error_; }  // empty as long as the connection is open
    int descriptor() const { return socket_.descriptor(); }
    int peer() const { return peer_; }

private:
    static constexpr std::size_t kStaging = 16 << 10;
    static constexpr int kReadsAtOnce = 16;  // then the other connections have their turn
    // Trailers are left of messages up to this size, and so many in turn: a sender may have 10 unacknowledged packets
    // on a new connection.
    static constexpr std::size_t kSmall = 4 << 10;
    static constexpr int kMostUnread = 7;

    void consume_staged(Inbox& inbox);
    bool start_message(Inbox& inbox);

    Socket socket_;
    const int peer_;
    std::unique_ptr<std::byte[]> staging_;           // bytes that have been read and whose place was not known then
    std::size_t staged_begin_ = 0, staged_end_ = 0;  // the range of these bytes in staging_
    ArrivalPtr arrival_;                             // the message that is coming; null before a header
    std::size_t received_ = 0;                       // how many of its bytes have come
    std::size_t last_bytes_ = 0;                     // the length of the last message
    int unread_trailers_ = 0;                        // how many reads in turn have left a trailer
    bool is_stalled_ = false, has_left_ = false;
    Failure error_;
};

}  // namespace dist_prims
