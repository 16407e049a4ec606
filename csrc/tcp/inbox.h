// The messages that have come or are coming on a lane, and the receives that wait for them.
//
// A message goes to the first receive with its sender and tag, straight into its memory. If no receive has been posted,
// a small message is kept in a buffer. A large one stays in the kernel's buffers, and so holds back its sender, until
// its receive is posted, or until a message behind it on the same connection is needed: a thread waits for it, or its
// receive reads ahead.
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
    Failure error{};                // why it failed
    bool has_other_length = false;  // the message: that is the error
    bool is_aborted = false;        // the next wait, or the current one, returns early
    bool is_awaited = false;        // by a thread
};
using TcpMessagePtr = std::shared_ptr<TcpMessage>;

// A message on its way in, and where its bytes go.
struct Arrival {
    int from, tag;
    std::size_t bytes;
    std::byte* data;
    TcpMessagePtr receive{};                // whose memory `data` is; without one it is the memory of `buffer`
    std::unique_ptr<std::byte[]> buffer{};  //
    TcpMessagePtr claimed_by{};             // the receive that was posted while the buffer was being filled
    bool is_complete = false;
};
using ArrivalPtr = std::shared_ptr<Arrival>;

class Inbox {
public:
    static constexpr std::size_t kSmall = 64
                                          << 10;  // a message of up to this size is kept before its receive is posted

    // A message begins. Returns null if it is not accepted yet.
    ArrivalPtr begin(int from, int tag, std::size_t bytes);
    // All bytes of the message are at `data`.
    void complete(Arrival& arrival);

    void post(const TcpMessagePtr& receive);
    // The receive's memory must not be written to any more.
    void withdraw(const TcpMessagePtr& receive);
    // The receives from this rank fail, except of messages that have come.
    void fail(int from, const Failure& error);
    void fail_all(const Failure& error);
    std::size_t expected_bytes() const { return expected_; }  // of the receives that no message has met

private:
    using Key = std::pair<int, int>;  // sender and tag

    TcpMessagePtr take_receive(int from, int tag);
    bool is_needed(int from) const;
    void finish(const TcpMessagePtr& receive, const Arrival& arrival);

    std::map<Key, std::deque<TcpMessagePtr>> posted_;   // the sender may be kAnyone
    std::map<Key, std::deque<ArrivalPtr>> unexpected_;  // for which no receive was posted
    std::list<ArrivalPtr> filling_;                     // whose bytes are coming
    std::size_t expected_ = 0;
};

}  // namespace dist_prims
