// TCP sockets: a descriptor with an owner, and the system calls that the transport needs. All sockets are non-blocking.
#pragma once

#include <cerrno>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "../net/transport.h"

namespace dist_prims {

class Socket {
public:
    Socket() = default;
    explicit Socket(int descriptor) : descriptor_(descriptor) {}
    Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
    Socket& operator=(Socket&& other) noexcept {
        std::swap(descriptor_, other.descriptor_);
        return *this;
    }
    ~Socket();

    int descriptor() const { return descriptor_; }

private:
    int descriptor_ = -1;
};

// Begins a connection to "10.0.0.1:4711" or "[fd00::1]:4711"; the socket becomes writable when it is established or has
// failed. Throws std::system_error with the address in its message; EADDRNOTAVAIL only if this host has no port left.
Socket connect_to(const std::string& address);
// The next connection that waits to be accepted, if there is one. Throws std::system_error if this process has no
// descriptors left, or the kernel no memory.
std::optional<Socket> accept_from(const Socket& listening);

// Polls and sleeps find the socket readable only if it has this many bytes, or the connection has ended.
void wake_from(const Socket& socket, int bytes);

// Whether bytes that were sent have not been acknowledged, although the kernel has sent them again.
bool is_unanswered(const Socket& socket);
// How much the peer has acknowledged, and in how much time: see Transport::Delivered.
Transport::Delivered delivered(const Socket& socket);

// Why a connection or a message has failed; empty if it has not. `number`: an errno, or 0.
struct Failure {
    std::string text{};
    int number = 0;

    bool empty() const { return text.empty(); }
    // Whether this process has no descriptor left, or its host no port for the own end of a connection.
    bool is_exhaustion() const { return number == EMFILE || number == ENFILE || number == EADDRNOTAVAIL; }
    // Whether the host of the peer, or the way to it, is down.
    bool is_unreachable() const {
        return number == ENETUNREACH || number == EHOSTUNREACH || number == ENETDOWN || number == EHOSTDOWN ||
               number == ETIMEDOUT;
    }
};

// What a read or a write has achieved. `error` is empty as long as the connection is open.
struct SocketResult {
    std::size_t bytes = 0;
    Failure error{};
};

struct SocketPart {
    void* data;
    std::size_t bytes;
};
// Reads into, or writes from, one part after the other, as much as is possible without waiting.
SocketResult read_some(const Socket& socket, const SocketPart* parts, std::size_t count);
SocketResult write_some(const Socket& socket, const SocketPart* parts, std::size_t count);

}  // namespace dist_prims
