// A message that a rank sends or expects through UCX.
#pragma once

#include <memory>
#include <string>

#include "../net/transport.h"

namespace dist_prims::ucx {

class Lane;

struct Message {
    Lane* lane;
    bool is_outgoing;
    int peer, tag;    // the peer of a receive may be Transport::kAnyone
    std::byte* data;  // null when the memory must not be used any more
    std::size_t bytes;
    Transport::Owner owner;
    bool may_be_shorter = false;  // a message that a receive expects
    ClaimPtr claim{};             // of a receive from any rank

    // UCX cannot always be made to release the memory of a message that has begun. A message without an owner is
    // therefore sent from here, or received into here and then copied.
    std::unique_ptr<std::byte[]> staging{};
    void* request = nullptr;  // of UCX, while UCX uses the memory

    bool is_done = false;           // received, or handed to UCX
    std::string error{};            // why it failed; empty if it has not
    bool has_other_length = false;  // the message: that is the error
    bool is_unreachable = false;    // the peer, by any device of UCX: that is the error
    bool is_aborted = false;        // the next wait, or the current one, returns early
};
using MessagePtr = std::shared_ptr<Message>;

}  // namespace dist_prims::ucx
