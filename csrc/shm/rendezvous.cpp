#include "rendezvous.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <list>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>

#include "../common/packets.h"

namespace dist_prims {
namespace {

using namespace std::chrono_literals;
using Kind = CommError::Kind;

constexpr std::size_t kWord = 32;          // characters of the random word of a rendezvous
constexpr std::size_t kMostKnown = 1024;   // processes that a Hello lists
constexpr std::size_t kMostMembers = 200;  // ranks of one Introduction: each may have a descriptor
constexpr auto kLookEvery = 50ms;          // between two calls of RendezvousOptions::look
constexpr auto kAskEvery = 2ms;            // between two attempts to find and reach rank 0
constexpr auto kTimeForHello = 1s;         // after which a silent connection is dropped
constexpr auto kTimeForReason = 1s;        // after a connection has ended, until the death of the process is seen
static_assert(kMostMembers < kMostAttached);

// The first packet of a rank. The ids of the processes that it watches follow; its exit descriptor is attached.
struct Hello {
    std::array<char, 16> magic{'d', 'i', 's', 't', '_', 'p', 'r', 'i', 'm', 's', ' ', '2', 0, 0, 0, 0};
    std::array<char, kWord> word{};
    ProcessId process;
    std::int64_t rank = -1;
};

// A packet of rank 0. A Member for each introduced rank follows. The memory, and then exit descriptors are attached.
struct Introduction {
    std::uint64_t has_memory = 0;
};

struct Member {
    ProcessId process;
    std::int32_t rank = -1;
    std::int32_t has_exit = 0;  // whether its exit descriptor is attached
};

template <typename Head, typename Item>
std::vector<std::byte> encode(const Head& head, const std::vector<Item>& items) {
    std::vector<std::byte> data(sizeof(Head) + items.size() * sizeof(Item));
    std::memcpy(data.data(), &head, sizeof(Head));
    if (!items.empty()) std::memcpy(data.data() + sizeof(Head), items.data(), items.size() * sizeof(Item));
    return data;
}

// The inverse of encode(); false if the length is wrong.
template <typename Head, typename Item>
bool decode(const std::vector<std::byte>& data, Head& head, std::vector<Item>& items) {
    if (data.size() < sizeof(Head) || (data.size() - sizeof(Head)) % sizeof(Item) != 0) return false;
    std::memcpy(&head, data.data(), sizeof(Head));
    items.resize((data.size() - sizeof(Head)) / sizeof(Item));
    if (!items.empty()) std::memcpy(items.data(), data.data() + sizeof(Head), items.size() * sizeof(Item));
    return true;
}

std::size_t index(int rank) {
    return static_cast<std::size_t>(rank);
}

std::string random_word() {
    std::array<unsigned char, kWord / 2> bytes{};
    fill_random(bytes.data(), bytes.size());
    std::string word;
    for (unsigned char byte : bytes) {
        word += "0123456789abcdef"[byte >> 4];
        word += "0123456789abcdef"[byte & 15];
    }
    return word;
}

std::string address_of(const std::string& word) {
    return "dist_prims-" + word;
}

[[noreturn]] void fail_without_descriptors() {
    errno = EMFILE;
    throw_errno("receiving descriptors from another rank");
}

// What rank 0 and the other ranks have in common: the ranks that are known so far, waits, and errors.
class Participant {
protected:
    explicit Participant(const RendezvousOptions& options) : options_(options), members_(index(options.size)) {}

    struct KnownMember {
        ProcessId process{};
        ExitDescriptor exit;  // null: a rank of this process, or a rank that is not known
        bool is_known = false;
    };

    bool is_complete() const {
        return std::all_of(members_.begin(), members_.end(), [](const KnownMember& member) { return member.is_known; });
    }

    std::vector<ExitDescriptor> exits() const {
        std::vector<ExitDescriptor> exits;
        for (const KnownMember& member : members_) exits.push_back(member.exit);
        return exits;
    }

    // Waits until poll() reports an entry, for `longest` or less. Throws after the timeout, and what `look` throws.
    void wait(std::vector<pollfd>& entries, Clock::duration longest) {
        auto now = Clock::now();
        if (now >= next_look_) {
            options_.look();
            if (const int rank = options_.ended(); rank >= 0) fail_dead(rank);
            now = Clock::now();
            next_look_ = now + kLookEvery;
        }
        if (now >= deadline_)
            fail(Kind::kTimeout, "timeout after " + std::to_string(options_.timeout.count()) +
                                     " ms while the group was made: no sign of " + absent_ranks());
        const auto left =
            std::chrono::ceil<std::chrono::milliseconds>(std::min({longest, next_look_ - now, deadline_ - now}));
        if (::poll(entries.data(), entries.size(), static_cast<int>(left.count())) >= 0) return;
        if (errno != EINTR) throw_errno("waiting for other ranks");
        for (pollfd& entry : entries) entry.revents = 0;
        next_look_ = Clock::now();  // `look` may throw what the handler of the signal has raised
    }

    void pause(Clock::duration time) {
        std::vector<pollfd> none;
        wait(none, time);
    }

    // Called after a rank has closed its connection. Throws if the process of the rank has died, which may be seen a
    // moment later, or if `look` throws the error that the rank has left in the store.
    void wait_for_reason(int rank) {
        const auto until = Clock::now() + kTimeForReason;
        while (Clock::now() < until) {
            std::vector<pollfd> entries{exit_entry(rank)};
            wait(entries, kLookEvery);
            if (entries[0].revents) fail_dead(rank);
        }
    }

    // poll() reports it when the process of the rank has ended.
    pollfd exit_entry(int rank) const {
        const ExitDescriptor& exit = members_[index(rank)].exit;
        return {exit ? exit->get() : -1, POLLIN, 0};
    }

    [[noreturn]] void fail_dead(int rank) const {
        fail(Kind::kPeerDied,
             title(rank) +
                 " has died while the group was made; look at what it printed last, and start the group again");
    }

    [[noreturn]] void fail(Kind kind, const std::string& what) const {
        throw CommError(kind, options_.names.own_name(options_.rank) + ": " + what);
    }

    std::string title(int rank) const { return options_.names.title(options_.names.group_rank(rank)); }

    const RendezvousOptions& options_;
    std::vector<KnownMember> members_;  // by rank

private:
    std::string absent_ranks() const {
        std::string text;
        for (int rank = 0; rank < options_.size; ++rank) {
            if (!members_[index(rank)].is_known && rank != options_.rank)
                text += (text.empty() ? "" : ", ") + title(rank);
        }
        return text;
    }

    const Clock::time_point deadline_ = Clock::now() + options_.timeout;
    Clock::time_point next_look_ = Clock::now() + kLookEvery;
};

// Rank 0.
class Server : Participant {
public:
    Server(const RendezvousOptions& options, const Descriptor& memory)
        : Participant(options), memory_(memory), own_exit_(make_exit_descriptor()) {
        members_[0] = {this_process_id(), nullptr, true};
    }

    std::vector<ExitDescriptor> serve(const std::function<void(const std::string&)>& publish_word) {
        word_ = random_word();
        const Descriptor listener = listen_at(address_of(word_), options_.size);
        publish_word(word_);
        while (!is_complete()) {
            // 1. Wait for the listener, the processes of the ranks, or the connections.
            std::vector<pollfd> entries{{listener.get(), POLLIN, 0}};
            for (int rank = 1; rank < options_.size; ++rank) entries.push_back(exit_entry(rank));
            for (const Connection& connection : connections_) entries.push_back({connection.socket.get(), POLLIN, 0});
            wait(entries, kLookEvery);
            // 2. Look at all of them, in the same order. New connections come last, because they have no entry.
            auto entry = entries.begin() + 1;
            for (int rank = 1; rank < options_.size; ++rank) {
                if ((entry++)->revents) fail_dead(rank);
            }
            std::erase_if(connections_,
                          [&](Connection& connection) { return !serve_connection((entry++)->revents, connection); });
            if (entries[0].revents) accept(listener);
        }
        for (const Connection& connection : connections_) introduce_others(connection);
        return exits();
    }

private:
    struct Connection {
        Descriptor socket;
        Clock::time_point since = Clock::now();
        int rank = -1;                // until its Hello has come
        std::set<ProcessId> known{};  // processes of which the rank needs no exit descriptor
    };

    void accept(const Descriptor& listener) {
        for (;;) {
            Descriptor socket = accept_from(listener);
            if (socket.get() < 0) return;
            if (is_our_user(socket)) connections_.push_back({std::move(socket)});
        }
    }

    // False if the connection is to be closed.
    bool serve_connection(bool is_ready, Connection& from) {
        if (!is_ready) return from.rank >= 0 || Clock::now() < from.since + kTimeForHello;
        bool has_ended = false;
        std::optional<Packet> packet = receive_packet(from.socket, has_ended);
        if (from.rank < 0) return packet ? handshake(from, *packet) : !has_ended;
        if (!has_ended) return true;
        wait_for_reason(from.rank);
        fail(Kind::kPeerLeft, title(from.rank) + " gave up while the group was made; see the error that it raised");
    }

    // Accepts a rank by its Hello, and sends it the memory and rank 0. False if the packet is not a valid Hello.
    bool handshake(Connection& from, Packet& packet) {
        const Hello right;
        Hello hello;
        std::vector<ProcessId> known;
        if (!decode(packet.data, hello, known) || hello.magic != right.magic ||
            !std::equal(word_.begin(), word_.end(), hello.word.begin()))
            return false;
        if (hello.rank < 1 || hello.rank >= options_.size || members_[index(static_cast<int>(hello.rank))].is_known)
            return false;
        from.rank = static_cast<int>(hello.rank);
        from.known.insert(known.begin(), known.end());
        from.known.insert(hello.process);
        members_[index(from.rank)] = {hello.process, exit_of(hello.process, packet), true};
        introduce(from, {0}, true);
        return true;
    }

    // The exit descriptor of a rank that has sent a Hello; null if the rank is a thread of this process.
    ExitDescriptor exit_of(const ProcessId& process, Packet& packet) const {
        if (process == members_[0].process) return nullptr;
        if (auto exit = find_exit_descriptor(process)) return exit;
        if (packet.attached.size() != 1) fail_without_descriptors();
        return share_exit_descriptor(process, std::move(packet.attached[0]));
    }

    void introduce_others(const Connection& to) {
        std::vector<int> ranks;
        for (int rank = 1; rank < options_.size; ++rank) {
            ranks.push_back(rank);
            if (ranks.size() == kMostMembers || rank == options_.size - 1)
                introduce(to, std::exchange(ranks, {}), false);
        }
    }

    void introduce(const Connection& to, const std::vector<int>& ranks, bool with_memory) {
        std::vector<int> attached;
        if (with_memory) attached.push_back(memory_.get());
        std::vector<Member> members;
        for (const int rank : ranks) {
            const KnownMember& member = members_[index(rank)];
            const bool is_new = !to.known.contains(member.process);
            members.push_back({member.process, rank, is_new});
            if (is_new) attached.push_back(member.exit ? member.exit->get() : own_exit_.get());
        }
        const std::vector<std::byte> data = encode(Introduction{with_memory}, members);
        // Any other error means that the rank has closed its connection or died: serve() and wait() notice both.
        while (send_packet(to.socket, data, attached) == EAGAIN) pause(1ms);
    }

    const Descriptor& memory_;
    const Descriptor own_exit_;
    std::string word_;
    std::list<Connection> connections_;
};

// Every other rank.
class Client : Participant {
public:
    explicit Client(const RendezvousOptions& options) : Participant(options), known_(known_processes()) {}

    RendezvousResult join(const std::function<std::string()>& word) {
        for (;;) {
            if (const std::string published = word(); published.size() == kWord) join_at(published);
            if (is_complete()) return {std::move(memory_), exits()};
            pause(kAskEvery);
        }
    }

private:
    // One attempt: connects, sends the Hello, and reads introductions until they are complete or the connection ends.
    void join_at(const std::string& word) {
        bool is_refused = false;
        const Descriptor connection = connect_to(address_of(word), is_refused);
        if (is_refused) {
            wait_for_reason(0);
            const char* const host = std::getenv("DIST_PRIMS_HOST_ID");
            const std::string other_host = std::string(", or is on another host: DIST_PRIMS_HOST_ID=") +
                                           (host ? host : "") + " is set on both, and must be different on each host";
            fail(Kind::kPeerDied, title(0) + " does not listen here: it has died or given up while the group was made" +
                                      (host ? other_host : ""));
        }
        if (connection.get() < 0 || !is_our_user(connection) || !handshake(connection, word)) return;
        while (!is_complete()) {
            std::vector<pollfd> entries{{connection.get(), POLLIN, 0}, exit_entry(0)};
            wait(entries, kLookEvery);
            if (entries[0].revents) {
                bool has_ended = false;
                std::optional<Packet> packet = receive_packet(connection, has_ended);
                if (has_ended) return;  // the next attempt finds the reason
                if (packet) on_introduction(*packet);
            } else if (entries[1].revents) {
                fail_dead(0);
            }
        }
    }

    // Sends the Hello; false if the connection has ended.
    bool handshake(const Descriptor& connection, const std::string& word) {
        Hello hello;
        std::copy(word.begin(), word.end(), hello.word.begin());
        hello.process = this_process_id();
        hello.rank = options_.rank;
        std::vector<ProcessId> known;
        for (const KnownProcess& process : known_) {
            if (known.size() < kMostKnown) known.push_back(process.id);
        }
        const std::vector<std::byte> data = encode(hello, known);
        const Descriptor exit = make_exit_descriptor();
        for (;;) {
            const int error = send_packet(connection, data, {exit.get()});
            if (error != EAGAIN) return error == 0;
            pause(1ms);
        }
    }

    void on_introduction(Packet& packet) {
        if (packet.lacks_descriptors) fail_without_descriptors();
        Introduction head;
        std::vector<Member> members;
        if (!decode(packet.data, head, members)) fail(Kind::kLost, title(0) + " sent what is no introduction");
        auto attached = packet.attached.begin();
        const auto take_attached = [&] {
            return attached == packet.attached.end() ? Descriptor() : std::move(*attached++);
        };
        if (head.has_memory) memory_ = take_attached();
        for (const Member& member : members) {
            ExitDescriptor exit;
            if (member.has_exit)
                exit = share_exit_descriptor(member.process, take_attached());
            else if (member.process != this_process_id())
                exit = find_exit_descriptor(member.process);
            members_.at(index(member.rank)) = {member.process, std::move(exit), true};
        }
    }

    // Kept until all introductions have come, because rank 0 sends no exit descriptors of these processes.
    const std::vector<KnownProcess> known_;
    Descriptor memory_;
};

}  // namespace

RendezvousResult host_rendezvous(const RendezvousOptions& options, Descriptor memory,
                                 const std::function<void(const std::string&)>& publish_word) {
    if (options.size == 1) return {std::move(memory), {nullptr}};
    std::vector<ExitDescriptor> exits = Server(options, memory).serve(publish_word);
    return {std::move(memory), std::move(exits)};
}

RendezvousResult join_rendezvous(const RendezvousOptions& options, const std::function<std::string()>& word) {
    return Client(options).join(word);
}

}  // namespace dist_prims
