// A message that a rank sends or expects through UCX. The lock of its lane guards it.
#pragma once

#include <memory>
#include <string>

#include "../net/transport.h"

namespace dist_prims::ucx {

class Lane;

struct Message {
    Lane* lane;
    bool is_outgoing;
    int peer, tag;           // the peer of a receive may be Transport::kAnyone, until a message has met the receive
    std::byte* data;         // the memory of the caller; null when it must not be used any more
    std::size_t bytes;       // of data
    Transport::Owner owner;  // keeps the memory of the caller alive; may be null
    bool may_be_shorter = false;  // whether a receive accepts a message of fewer bytes
    ClaimPtr claim{};             // of a receive that is posted in two places, from any rank; otherwise null

    // UCX cannot always be made to release memory that it uses. A message without an owner is therefore sent from this
    // buffer, or received into it and then copied.
    std::unique_ptr<std::byte[]> staging{};
    void* request = nullptr;  // UCX's handle of the message while UCX uses the memory

    bool is_done = false;           // received; or sent, so that UCX does not need the memory any more
    std::string error{};            // why the message has failed; empty if it has not
    bool has_other_length = false;  // the kind of the error: the message has another length than the receive
    bool is_unreachable = false;    // the kind of the error: no device of UCX leads to the peer
    bool is_aborted = false;        // the next wait, or the current one, returns early
    bool is_awaited = false;        // by a thread; see WaitingThreads
};
using MessagePtr = std::shared_ptr<Message>;

}  // namespace dist_prims::ucx
