#include "packets.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace dist_prims {
namespace {

struct Address {
    sockaddr_un name{};
    socklen_t length;

    explicit Address(const std::string& text) {
        name.sun_family = AF_UNIX;
        // The text stands after the 0 that makes the address abstract. Both sides cut a longer text at the same place.
        const std::size_t longest = sizeof(name.sun_path) - 1;
        std::memcpy(name.sun_path + 1, text.data(), std::min(text.size(), longest));
        length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + std::min(text.size(), longest));
    }
    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

Descriptor packet_socket() {
    Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (socket.get() < 0) throw_errno("a Unix socket");
    return socket;
}

// Memory for the descriptors of one packet, in the layout of the kernel.
using Control = std::array<char, CMSG_SPACE(kMostAttached * sizeof(int))>;

std::vector<Descriptor> take_attached(msghdr& message) {
    std::vector<Descriptor> attached;
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
        const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (std::size_t index = 0; index < count; ++index) {
            int number = -1;
            std::memcpy(&number, CMSG_DATA(header) + index * sizeof(int), sizeof(int));
            attached.emplace_back(number);
        }
    }
    return attached;
}

}  // namespace

Descriptor listen_at(const std::string& address, int backlog) {
    const Address at(address);
    Descriptor listener = packet_socket();
    if (::bind(listener.get(), at.get(), at.length) != 0 || ::listen(listener.get(), backlog) != 0)
        throw_errno("listening on an abstract Unix socket");
    return listener;
}

Descriptor connect_to(const std::string& address, bool& is_refused) {
    const Address at(address);
    Descriptor connection = packet_socket();
    const bool is_connected = uninterrupted([&] { return ::connect(connection.get(), at.get(), at.length); }) == 0;
    is_refused = !is_connected && errno == ECONNREFUSED;
    return is_connected ? std::move(connection) : Descriptor();
}

Descriptor accept_from(const Descriptor& listener) {
    Descriptor connection(
        uninterrupted([&] { return ::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); }));
    if (connection.get() < 0 && errno != EAGAIN && errno != ECONNABORTED) throw_errno("accepting a connection");
    return connection;
}

bool is_our_user(const Descriptor& connection) {
    ucred credentials{};
    socklen_t length = sizeof(credentials);
    return ::getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 &&
           credentials.uid == ::geteuid();
}

int send_packet(const Descriptor& connection, const std::vector<std::byte>& data, const std::vector<int>& attached) {
    iovec content{const_cast<std::byte*>(data.data()), data.size()};
    msghdr message{};
    message.msg_iov = &content;
    message.msg_iovlen = 1;
    alignas(cmsghdr) Control control{};
    if (!attached.empty()) {
        message.msg_control = control.data();
        message.msg_controllen = CMSG_SPACE(attached.size() * sizeof(int));
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(attached.size() * sizeof(int));
        std::memcpy(CMSG_DATA(header), attached.data(), attached.size() * sizeof(int));
    }
    if (uninterrupted([&] { return ::sendmsg(connection.get(), &message, MSG_NOSIGNAL); }) >= 0) return 0;
    // ETOOMANYREFS: the kernel limits how many descriptors of a user are on their way; receivers release them.
    return errno == ETOOMANYREFS || errno == ENOBUFS || errno == ENOMEM ? EAGAIN : errno;
}

std::optional<Packet> receive_packet(const Descriptor& connection, bool& ended) {
    ended = false;
    // The length of the next packet, which stays in the queue; 0 if the other side has closed.
    const auto length = uninterrupted([&] { return ::recv(connection.get(), nullptr, 0, MSG_PEEK | MSG_TRUNC); });
    ended = length == 0 || (length < 0 && errno != EAGAIN);
    if (length <= 0) return std::nullopt;
    Packet packet;
    packet.data.resize(std::min(static_cast<std::size_t>(length), kLongestPacket));
    iovec content{packet.data.data(), packet.data.size()};
    alignas(cmsghdr) Control control{};
    msghdr message{};
    message.msg_iov = &content;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    if (uninterrupted([&] { return ::recvmsg(connection.get(), &message, MSG_CMSG_CLOEXEC); }) < 0) {
        ended = errno != EAGAIN;
        return std::nullopt;
    }
    packet.attached = take_attached(message);
    packet.lacks_descriptors = (message.msg_flags & MSG_CTRUNC) != 0;
    return packet;
}

}  // namespace dist_prims
