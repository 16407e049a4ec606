// Packets between processes of one host: messages over Unix sockets of type SOCK_SEQPACKET, with descriptors attached.
// A socket of this type keeps the boundaries of messages, and reports that the peer has ended. No function here blocks.
// Each throws std::system_error if this process runs out of a resource, such as descriptors. What the peer does
// (refuses, closes, does not read) is a result.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "shared_memory.h"

namespace dist_prims {

inline constexpr std::size_t kMostAttached = 253;  // descriptors of a packet: SCM_MAX_FD of the kernel
// Bytes of a packet: several packets fit into the buffer of a socket. receive_packet() cuts a longer one.
inline constexpr std::size_t kLongestPacket = 64 * 1024;

struct Packet {
    std::vector<std::byte> data;
    std::vector<Descriptor> attached;
    bool lacks_descriptors = false;  // some of them were lost: this process has reached its limit of open files
};

// Return a socket that listens at an abstract address. Such an address has no file, and is seen in this network
// namespace only.
Descriptor listen_at(const std::string& address, int backlog);
// Return a connection to `address`, or an invalid descriptor (-1). Then `is_refused` is true if no socket listens at
// the address; otherwise a later attempt may succeed.
Descriptor connect_to(const std::string& address, bool& is_refused);
// Return the next connection that waits at `listener`, or an invalid descriptor (-1) if none waits.
Descriptor accept_from(const Descriptor& listener);

// Whether the process at the other end runs under the user id of this one.
bool is_our_user(const Descriptor& connection);

// Return 0 or an errno. EAGAIN: the packet was not sent and may be sent later, because a buffer is full or too many
// descriptors are on their way.
int send_packet(const Descriptor& connection, const std::vector<std::byte>& data, const std::vector<int>& attached);

// Return the next packet. If there is none, `ended` is true if the peer has closed the connection or the connection has
// failed, and false if no packet has arrived yet.
std::optional<Packet> receive_packet(const Descriptor& connection, bool& ended);

}  // namespace dist_prims
