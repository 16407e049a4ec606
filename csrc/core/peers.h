// The ranks of one host as processes: who takes part, who has died or left, and why the group has ended if it has.
//
// The first error is the one that all ranks tell: it is left in shared memory, and whoever waits for others looks there
// now and then. Every member may be called from any thread of its rank.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "attach.h"
#include "memory.h"

namespace dist_prims {

// What goes wrong between ranks. After a Mismatch the group can go on; after the others it cannot.
class CommError : public std::runtime_error {
public:
    enum class Kind { kMismatch, kPeerDied, kPeerLeft, kTimeout, kInterrupted, kLost };
    CommError(Kind kind, const std::string& message) : std::runtime_error(message), kind(kind) {}
    const Kind kind;
};

// What ranks are called in errors, where a group spans hosts. On one host they are what they are.
struct Names {
    std::vector<int> numbers;         // in the group, of the ranks of this host
    std::vector<std::string> titles;  // of all ranks of the group: "rank 5 on host b"
};

class Peers {
public:
    static constexpr std::size_t kLine = 64;  // bytes of a cache line: what one rank writes has lines of its own
    static std::size_t bytes(int size);

    // Why the group has ended; the culprit by its number in the group.
    struct Notice {
        CommError::Kind kind;
        int culprit;
    };

    // `place`: bytes(size) of the shared memory.
    Peers(std::shared_ptr<const Mapping> memory, std::byte* place, int rank, int size, Names names = {});
    ~Peers();
    Peers(const Peers&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }
    int process(int rank) const;
    // Of a rank of this host, in the group; and what to call that.
    int number(int rank) const;
    std::string title(int number) const;

    // Note on which core this rank runs, for those who wait for it; and whether one of those that it awaits, ranks
    // `from` and up for which `awaited` holds, was last on the same: then it cannot come before this rank gives the
    // core away.
    void note_core();
    template <typename Awaited>
    bool shares_core(int from, const Awaited& awaited) const {
        for (int peer = from; peer < size_; ++peer) {
            const int there = core(peer);
            if ((there == core_ || there == kNowhere) && peer != rank_ && awaited(peer)) return true;
        }
        return false;
    }

    // Once all ranks are here: notice when one of their processes ends.
    void watch();

    // Called now and then while waiting, on the waiting thread; what it throws ends the wait.
    void on_wait(std::function<void()> interrupt) { interrupt_ = std::move(interrupt); }
    // Called likewise by who waits for ranks of this host, with one of them, as it is called in the group.
    void on_look(std::function<void(int)> told) { told_ = std::move(told); }

    // Sleep until another rank rings for this one, but not long; not at all if `over` holds. Whoever does something
    // that others may wait for rings for them afterwards: of the two, one sees what the other has done.
    template <typename Over>
    void sleep(const Over& over) {
        const unsigned heard = listen();
        if (!over()) doze(heard);
        stop_listening();
    }
    void ring(int rank) const;

    // Tell the others that this rank will not come back: those who wait for it, or will, get an error.
    void leave();
    bool has_left(int rank) const;
    // End the waits of other threads of this rank with an error.
    void stop() { stopped_.store(true, std::memory_order_release); }

    // What someone is doing, in words, for an error; asked only when there is one.
    using What = std::function<std::string()>;

    // Throws if the group has ended.
    void heed(const What& what) const;
    std::optional<Notice> notice() const;
    // End the group; the first notice stands.
    void give_notice(CommError::Kind kind, int culprit) const;
    // A rank whose process has ended although it had not left, by its number in the group; -1 if there is none.
    int dead() const;

    // To be called now and then by who waits for the ranks for which `awaited` holds: throws, and ends the group, if
    // one of them has died or left, or the wait is to end.
    void look_around(const std::function<bool(int)>& awaited, const What& what);

    // End the group because this rank has waited for too long; `what` says how long, in what, and for whom.
    [[noreturn]] void give_up_waiting(const std::string& what) const;

private:
    static constexpr int kNowhere = -1;  // the core of one who sleeps

    friend class Patience;
    struct Post;
    struct Slate;

    Post& post(int rank) const;
    Slate& slate() const;
    unsigned listen();
    void doze(unsigned heard);
    void stop_listening();
    int core(int rank) const;
    void tell_of(const std::function<bool(int)>& awaited) const;
    int ended_process(const std::function<bool(int)>& awaited) const;
    [[noreturn]] void give_up(CommError::Kind kind, int culprit, const What& what) const;
    int process_of(int culprit) const;
    std::string complaint(CommError::Kind kind, int culprit, const std::string& what) const;

    const std::shared_ptr<const Mapping> memory_;
    std::byte* const place_;
    const int rank_, size_;
    const Names names_;
    std::vector<Descriptor> processes_;  // a pidfd of each, where the kernel gives one
    std::function<void()> interrupt_;
    std::function<void(int)> told_;
    std::atomic<int> core_{kNowhere};
    std::atomic<Clock::rep> yield_again_{0}, ban_{0};  // when to try whether the core comes back soon; the next pause
    std::atomic<Clock::rep> interrupted_{0};
    std::atomic<bool> stopped_{false};
};

// True on threads that work while others of this process compute, who want the core more.
inline thread_local bool in_background = false;

class InBackground {
public:
    InBackground() : before_(in_background) { in_background = true; }
    ~InBackground() { in_background = before_; }
    InBackground(const InBackground&) = delete;

private:
    const bool before_;
};

// How a wait spends its time: it spins while those it awaits run on other cores, gives its own away for a moment if one
// of them needs it, and sleeps if that takes long. To give the core away is quickest among ranks; but another process
// that wants the core keeps it for long, and then to sleep is quicker: who sleeps has a claim to be woken.
class Patience {
public:
    explicit Patience(Peers& peers) : peers_(&peers) {}

    // One turn. True when it is time to look around.
    template <typename Over>
    bool wait(bool shares_core, const Over& over) {
        if (spin(shares_core) || yield()) return false;
        peers_->sleep(over);
        return true;
    }

private:
    bool spin(bool shares_core);
    bool yield();

    Peers* peers_;
    int spins_ = 0, yields_ = 0;
};

}  // namespace dist_prims
