// The inbox of a lane: the messages that have come or are coming, and the posted receives. The lane calls it under its
// lock: for receives (post, withdraw), and through IncomingConnection, which reads the messages (begin, complete).
//
// A message goes to the first receive with its sender and tag, straight into the memory of the receive. If no receive
// has been posted, a small message is kept in a buffer. A large message then stays in the kernel's buffers, and so
// holds back its sender, until its receive is posted, or until a message behind it on the same connection is needed: a
// thread waits for that one, or its receive reads ahead.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "../net/transport.h"
#include "socket.h"

namespace dist_prims {

// A message that a rank sends or expects.
struct TcpMessage {
    bool is_outgoing;
    int peer, tag;  // the peer of a receive may be Transport::kAnyone
    std::byte* data;
    std::size_t bytes;
    Transport::Owner owner;
    bool may_be_shorter = false;  // a message that a receive expects
    bool reads_ahead = false;     // a receive for which messages that come before its own are read and kept
    ClaimPtr claim{};             // of a receive from any rank

    bool is_done = false;           // received, or handed to the kernel
    Failure error{};                // why the message failed
    bool has_other_length = false;  // the error is that the message and its receive differ in length
    bool is_aborted = false;        // the current or the next wait returns early
    bool is_awaited = false;        // by a thread; see WaitingThreads
};
using TcpMessagePtr = std::shared_ptr<TcpMessage>;

// A message on its way in. Its bytes go to `data`: the memory of `receive`, or of `buffer` if there is no receive.
struct Arrival {
    int from, tag;
    std::size_t bytes;
    std::byte* data;
    TcpMessagePtr receive{};
    std::unique_ptr<std::byte[]> buffer{};
    TcpMessagePtr late_receive{};  // was posted while the buffer was being filled
    bool is_complete = false;
};
using ArrivalPtr = std::shared_ptr<Arrival>;

class Inbox {
public:
    static constexpr std::size_t kSmall = 64 << 10;  // bytes; see above

    // A header has come. Returns where the bytes of the message go; null if the message is not accepted yet.
    ArrivalPtr begin(int from, int tag, std::size_t bytes);
    // All bytes of the message are at `data`.
    void complete(Arrival& arrival);

    void post(const TcpMessagePtr& receive);
    // Removes a receive, whose memory is not written to any more.
    void withdraw(const TcpMessagePtr& receive);
    // Nothing more comes from this rank: its messages that are not complete fail, and the receives that name it.
    // kAnyone: nothing more comes at all.
    void fail(int from, const Failure& error);
    std::size_t expected_bytes() const { return expected_; }  // of the receives that no message has met

private:
    using Key = std::pair<int, int>;  // sender and tag

    TcpMessagePtr take_receive(int from, int tag);
    bool is_needed(int from) const;
    void finish(const TcpMessagePtr& receive, const Arrival& arrival);

    std::map<Key, std::deque<TcpMessagePtr>> posted_;   // receives; the sender may be kAnyone
    std::map<Key, std::deque<ArrivalPtr>> unexpected_;  // messages that began before their receives were posted
    std::list<ArrivalPtr> filling_;                     // messages whose bytes are coming
    std::size_t expected_ = 0;                          // see expected_bytes()
};

}  // namespace dist_prims
