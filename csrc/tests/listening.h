// Sockets that listen, as Python makes them for a TcpEndpoint.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <stdexcept>
#include <string>

#include "../tcp/socket.h"

namespace dist_prims {

// Listens at a loopback address, on a port that the kernel chooses.
inline Socket listen_at_loopback(int family = AF_INET) {
    sockaddr_in6 v6{};
    sockaddr_in v4{};
    v6.sin6_family = AF_INET6;
    v6.sin6_addr = in6addr_loopback;
    v4.sin_family = AF_INET;
    v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const auto* const address =
        family == AF_INET ? reinterpret_cast<const sockaddr*>(&v4) : reinterpret_cast<const sockaddr*>(&v6);
    Socket made(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (::bind(made.descriptor(), address, family == AF_INET ? sizeof(v4) : sizeof(v6)) != 0 ||
        ::listen(made.descriptor(), SOMAXCONN) != 0)
        throw std::runtime_error("no socket listens");
    return made;
}

inline std::string address_of(const Socket& listening) {
    sockaddr_in6 found{};
    socklen_t length = sizeof(found);
    ::getsockname(listening.descriptor(), reinterpret_cast<sockaddr*>(&found), &length);
    // The port is at the same place in both kinds of addresses.
    return (found.sin6_family == AF_INET ? "127.0.0.1:" : "[::1]:") + std::to_string(ntohs(found.sin6_port));
}

}  // namespace dist_prims
