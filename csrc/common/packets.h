// Packets between processes of one host, with descriptors attached: Unix sockets of type SOCK_SEQPACKET, which keep the
// boundaries of messages and report the end of the other side. All calls here return at once. They throw
// std::system_error where a resource is missing; what the other side does is a result.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "shared_memory.h"

namespace dist_prims {

inline constexpr std::size_t kMostAttached = 253;         // descriptors of a packet: SCM_MAX_FD of the kernel
inline constexpr std::size_t kLongestPacket = 64 * 1024;  // bytes; a socket buffer holds some of them

struct Packet {
    std::vector<std::byte> data;
    std::vector<Descriptor> attached;
    bool is_cut = false;  // descriptors were attached for which this process has none left
};

// A socket that listens at an abstract address: one that leaves no file behind and that no other network namespace
// sees.
Descriptor listen_at(const std::string& address, int backlog);
// A connection to that address; none (-1) if it cannot be had now. `is_refused`: because no socket listens there.
Descriptor connect_to(const std::string& address, bool& is_refused);
// The next connection that was made to it; none (-1) if there is none.
Descriptor accept_from(const Descriptor& listener);

// Whether the process at the other end runs under the user id of this one.
bool is_our_user(const Descriptor& connection);

// 0, or an errno; EAGAIN means that the packet may be sent later.
int send_packet(const Descriptor& connection, const std::vector<std::byte>& data, const std::vector<int>& attached);

// The next packet. Without one, `ended` says whether the other side has closed the connection.
std::optional<Packet> receive_packet(const Descriptor& connection, bool& ended);

}  // namespace dist_prims
