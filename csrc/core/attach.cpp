#include "attach.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kWord = 32;  // characters of the word of a meeting
constexpr auto kPatience = 1s;     // with one who has connected

struct Hello {
    std::array<char, 16> magic{'d', 'i', 's', 't', '_', 'p', 'r', 'i', 'm', 's', ' ', '1', 0, 0, 0, 0};
    std::array<char, kWord> word{};
    std::int32_t rank = -1;
};

std::string random_word() {
    std::array<unsigned char, kWord / 2> raw{};
    if (::getrandom(raw.data(), raw.size(), 0) != static_cast<ssize_t>(raw.size()))
        throw std::runtime_error("getrandom");
    std::string word;
    for (unsigned char byte : raw) {
        word += "0123456789abcdef"[byte >> 4];
        word += "0123456789abcdef"[byte & 15];
    }
    return word;
}

struct Address {
    sockaddr_un name{};
    socklen_t length;

    explicit Address(const std::string& word) {
        const std::string text = "dist_prims-" + word;
        name.sun_family = AF_UNIX;
        std::memcpy(name.sun_path + 1, text.data(), std::min(text.size(), sizeof(name.sun_path) - 1));
        length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
    }
    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

Descriptor unix_socket() {
    Descriptor made(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (made.get() < 0) throw std::system_error(errno, std::generic_category(), "socket");
    return made;
}

bool readable(int descriptor, Clock::time_point deadline) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd entry{descriptor, POLLIN, 0};
    return ::poll(&entry, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000))) > 0;
}

bool is_our_user(int peer) {
    ucred credentials{};
    socklen_t length = sizeof(credentials);
    return ::getsockopt(peer, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 && credentials.uid == ::geteuid();
}

void send_descriptor(int peer, int descriptor) {
    char byte = 1;
    iovec data{&byte, 1};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
    ::sendmsg(peer, &message, MSG_NOSIGNAL);
}

Descriptor receive_descriptor(int peer) {
    char byte = 0;
    iovec data{&byte, 1};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    if (::recvmsg(peer, &message, MSG_CMSG_CLOEXEC) <= 0) return Descriptor();
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (!header || header->cmsg_type != SCM_RIGHTS) return Descriptor();
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(header), sizeof(int));
    return Descriptor(descriptor);
}

// The rank of one who has connected, or -1 for a stranger.
int greeted_rank(int peer, const std::string& word) {
    Hello hello;
    const Hello right;
    if (!is_our_user(peer) || !readable(peer, Clock::now() + kPatience)) return -1;
    if (::recv(peer, &hello, sizeof(hello), MSG_TRUNC) != static_cast<ssize_t>(sizeof(hello))) return -1;
    const bool knows = hello.magic == right.magic && std::equal(word.begin(), word.end(), hello.word.begin());
    return knows ? hello.rank : -1;
}

std::string names(const std::vector<bool>& seen) {
    std::string text;
    for (std::size_t rank = 1; rank < seen.size(); ++rank) {
        if (!seen[rank]) text += (text.empty() ? "" : ", ") + std::to_string(rank);
    }
    return text;
}

// One try: the memory, or nothing.
Descriptor try_to_fetch(int rank, const std::string& word, Clock::time_point deadline) {
    if (word.size() != kWord) return Descriptor();
    const Descriptor peer = unix_socket();
    const Address address(word);
    Hello hello;
    std::copy(word.begin(), word.end(), hello.word.begin());
    hello.rank = rank;
    if (::connect(peer.get(), address.get(), address.length) != 0 || !is_our_user(peer.get())) return Descriptor();
    if (::send(peer.get(), &hello, sizeof(hello), MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(hello)))
        return Descriptor();
    return readable(peer.get(), deadline) ? receive_descriptor(peer.get()) : Descriptor();
}

}  // namespace

Descriptor host_memory(std::size_t bytes, int size, const std::function<void(const std::string&)>& tell,
                       Clock::time_point deadline) {
    Descriptor memory = make_memory(bytes);
    const std::string word = random_word();
    const Address address(word);
    const Descriptor listener = unix_socket();
    if (::bind(listener.get(), address.get(), address.length) != 0 || ::listen(listener.get(), size) != 0) {
        throw std::system_error(errno, std::generic_category(), "listening on an abstract socket");
    }
    tell(word);
    std::vector<bool> seen(static_cast<std::size_t>(size));
    for (int missing = size - 1; missing > 0;) {
        if (!readable(listener.get(), deadline)) throw std::runtime_error("no sign of ranks " + names(seen));
        const Descriptor peer(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        const int rank = peer.get() < 0 ? -1 : greeted_rank(peer.get(), word);
        if (rank < 1 || rank >= size) continue;
        send_descriptor(peer.get(), memory.get());
        missing -= !seen[static_cast<std::size_t>(rank)];
        seen[static_cast<std::size_t>(rank)] = true;
    }
    return memory;
}

Descriptor fetch_memory(int rank, const std::function<std::string()>& word, Clock::time_point deadline) {
    while (Clock::now() < deadline) {
        Descriptor memory = try_to_fetch(rank, word(), deadline);
        if (memory.get() >= 0) return memory;
        std::this_thread::sleep_for(2ms);
    }
    throw std::runtime_error("no sign of rank 0");
}

}  // namespace dist_prims
