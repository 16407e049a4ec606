#include "socket.h"

#include <arpa/inet.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace dist_prims {
namespace {

constexpr std::size_t kMaxParts = 16;

[[noreturn]] void throw_errno(const std::string& what, int error = errno) {
    throw std::system_error(error, std::generic_category(), what);
}

struct SocketAddress {
    sockaddr_storage storage{};
    socklen_t length = 0;

    SocketAddress(const std::string& ip, int port) {
        auto* const v4 = reinterpret_cast<sockaddr_in*>(&storage);
        auto* const v6 = reinterpret_cast<sockaddr_in6*>(&storage);
        if (::inet_pton(AF_INET, ip.c_str(), &v4->sin_addr) == 1) {
            v4->sin_family = AF_INET;
            v4->sin_port = htons(static_cast<std::uint16_t>(port));
            length = sizeof(*v4);
        } else if (::inet_pton(AF_INET6, ip.c_str(), &v6->sin6_addr) == 1) {
            v6->sin6_family = AF_INET6;
            v6->sin6_port = htons(static_cast<std::uint16_t>(port));
            length = sizeof(*v6);
        } else {
            throw std::invalid_argument("'" + ip + "' is not an IPv4 or IPv6 address");
        }
    }
    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

SocketAddress parse(const std::string& address) {
    const std::size_t colon = address.rfind(':');
    if (colon == std::string::npos) throw std::invalid_argument("'" + address + "' is not of the form address:port");
    std::string ip = address.substr(0, colon);
    if (ip.size() > 2 && ip.front() == '[' && ip.back() == ']') ip = ip.substr(1, ip.size() - 2);
    return {ip, std::stoi(address.substr(colon + 1))};
}

// Whether this host has a source address for packets to this one. A datagram socket needs none of TCP's ports.
bool has_source_for(const SocketAddress& address) {
    const Socket probe(::socket(address.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    return ::connect(probe.descriptor(), address.get(), address.length) == 0 || errno != EADDRNOTAVAIL;
}

// Runs `call`, which reads or writes a msghdr, on these parts.
template <typename Transfer>
SocketResult transfer(const SocketPart* parts, std::size_t count, const Transfer& call) {
    std::array<iovec, kMaxParts> vectors;
    const std::size_t used = std::min(count, kMaxParts);
    std::transform(parts, parts + used, vectors.begin(),
                   [](const SocketPart& part) { return iovec{part.data, part.bytes}; });
    msghdr message{};
    message.msg_iov = vectors.data();
    message.msg_iovlen = used;
    const ssize_t moved = call(&message);
    if (moved >= 0) return {static_cast<std::size_t>(moved)};
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return {};
    const char* const remedy =
        errno == ECONNREFUSED ? ": has the process ended, or does a firewall close its port?" : "";
    return {0, {std::strerror(errno) + std::string(remedy), errno}};
}

}  // namespace

Socket::~Socket() {
    if (descriptor_ >= 0) ::close(descriptor_);
}

Socket connect_to(const std::string& address) {
    const SocketAddress parsed = parse(address);
    Socket socket(::socket(parsed.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (socket.descriptor() < 0) throw_errno("socket()");
    const int yes = 1;  // a small message must not wait for the acknowledgement of the last message
    ::setsockopt(socket.descriptor(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
    if (::connect(socket.descriptor(), parsed.get(), parsed.length) == 0 || errno == EINPROGRESS) return socket;
    // The kernel reports EADDRNOTAVAIL if no port is left, but also if no interface has an address for this connection.
    const int error = errno;
    if (error == EADDRNOTAVAIL && !has_source_for(parsed))
        throw_errno("connect() to " + address + ": no interface of this host has a source address for it", ENETUNREACH);
    throw_errno("connect() to " + address, error);
}

void wake_from(const Socket& socket, int bytes) {
    ::setsockopt(socket.descriptor(), SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof(bytes));
}

bool is_unanswered(const Socket& socket) {
    constexpr int kSentAgain = 2;  // after 0.6 s at least: the kernel doubles its interval of 0.2 s
    tcp_info info{};
    socklen_t length = sizeof(info);
    // The kernel probes a peer that does not read, or to which no route leads any more. An answer sets the count to 0.
    return ::getsockopt(socket.descriptor(), IPPROTO_TCP, TCP_INFO, &info, &length) == 0 &&
           std::max(info.tcpi_retransmits, info.tcpi_probes) >= kSentAgain;
}

Transport::Delivered delivered(const Socket& socket) {
    tcp_info info{};
    socklen_t length = sizeof(info);
    if (::getsockopt(socket.descriptor(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return {};
    return {info.tcpi_bytes_acked, std::chrono::microseconds(info.tcpi_busy_time - info.tcpi_rwnd_limited)};
}

std::optional<Socket> accept_from(const Socket& listening) {
    const int accepted = ::accept4(listening.descriptor(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (accepted < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM))
        throw_errno("accept()");
    if (accepted < 0) return std::nullopt;
    // Nothing is sent back on this connection. For such a connection the kernel sends a packet to acknowledge each
    // small message when it is read, unless this option makes it wait for the next message.
    const int no = 0;
    ::setsockopt(accepted, IPPROTO_TCP, TCP_QUICKACK, &no, sizeof(no));
    return Socket(accepted);
}

SocketResult read_some(const Socket& socket, const SocketPart* parts, std::size_t count) {
    bool is_at_end = false;
    SocketResult result = transfer(parts, count, [&](msghdr* message) {
        const iovec& first = *message->msg_iov;
        const ssize_t received = message->msg_iovlen == 1
                                     ? ::recv(socket.descriptor(), first.iov_base, first.iov_len, MSG_DONTWAIT)
                                     : ::recvmsg(socket.descriptor(), message, MSG_DONTWAIT);
        is_at_end = received == 0;
        return received;
    });
    if (is_at_end) result.error = {"the connection was closed"};
    return result;
}

SocketResult write_some(const Socket& socket, const SocketPart* parts, std::size_t count) {
    return transfer(parts, count, [&](const msghdr* message) {
        return ::sendmsg(socket.descriptor(), message, MSG_DONTWAIT | MSG_NOSIGNAL);
    });
}

}  // namespace dist_prims
