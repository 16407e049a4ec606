// The connections of a lane. Each carries messages in one direction: the rank that opens it is the one that sends.
//
//     greeting | header, data | header, data | ...
//
// A header with the tag kLeave marks that the rank leaves the group. Only notices follow such a header.
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

struct TcpHeader {
    std::int32_t tag, unused;
    std::uint64_t bytes;
    static constexpr std::int32_t kLeave = -1;  // as tag: the rank leaves the group
};

class OutgoingConnection {
public:
    // Throws std::system_error if the connection cannot even be begun.
    OutgoingConnection(const std::string& address, const Greeting& greeting);

    void push(const TcpMessagePtr& message);
    // Marks that this rank leaves the group: the peer must not take the end of the connection for a death.
    void push_leave();
    // Gives the kernel what it takes; messages are done when it has taken them whole.
    void write();
    // Checks whether the peer has closed the connection, on which the peer never sends anything.
    void look_for_end();
    // Drops a message of which nothing has been sent. Returns false if a part of it has.
    bool withdraw(const TcpMessagePtr& message);
    void fail(const Failure& error);

    bool has_unsent() const { return !queue_.empty(); }
    bool is_unanswered() const { return dist_prims::is_unanswered(socket_); }
    Transport::Delivered delivered() const { return dist_prims::delivered(socket_); }
    const Failure& error() const { return error_; }  // empty as long as the connection is open
    int descriptor() const { return socket_.descriptor(); }

private:
    static constexpr std::size_t kHead = sizeof(Greeting) > sizeof(TcpHeader) ? sizeof(Greeting) : sizeof(TcpHeader);
    // A message of which a part may have been sent: first its head, then its data.
    struct Unsent {
        std::array<std::byte, kHead> head;
        std::size_t head_bytes;
        TcpMessagePtr message;  // null: this is the greeting, or marks that the rank leaves
        std::size_t sent = 0;
        std::size_t bytes() const { return head_bytes + (message ? message->bytes : 0); }
    };

    template <typename Head>
    void push(const Head& head, const TcpMessagePtr& message);
    void advance(std::size_t bytes);

    const std::string address_;
    Socket socket_;
    std::deque<Unsent> queue_;
    bool has_sent_ = false;
    Failure error_;
};

class IncomingConnection {
public:
    IncomingConnection(Socket socket, int peer)
        : socket_(std::move(socket)), peer_(peer), staging_(new std::byte[kStaging]) {}

    // Reads what has come, up to a message that the inbox does not accept yet: see is_stalled().
    void read(Inbox& inbox);

    bool is_stalled() const { return is_stalled_; }
    bool has_left() const { return has_left_; }      // the peer has sent kLeave
    const Failure& error() const { return error_; }  // empty as long as the connection is open
    int descriptor() const { return socket_.descriptor(); }
    int peer() const { return peer_; }

private:
    static constexpr std::size_t kStaging = 16 << 10;
    static constexpr int kReads = 16;  // at once, so that the other connections have their turn

    void parse(Inbox& inbox);
    bool begin_message(Inbox& inbox);

    Socket socket_;
    const int peer_;
    std::unique_ptr<std::byte[]> staging_;  // bytes that have been read, but not yet parsed
    std::size_t first_ = 0, last_ = 0;      // of these bytes
    ArrivalPtr current_;                    // the message that is coming
    std::size_t received_ = 0;              // of its bytes
    bool is_stalled_ = false, has_left_ = false;
    Failure error_;
};

}  // namespace dist_prims
