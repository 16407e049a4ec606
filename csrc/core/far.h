// The ranks of other hosts, as one rank reaches them: messages through an engine, and how a failure on one host becomes
// known on the others.
//
// On one host all ranks see the notice in shared memory. Across hosts a rank whose group has ended sends a word to all
// others, which have asked for it beforehand, and then lets its connections go: so whoever waits for it wakes, and
// looks for the word before he blames who was only the messenger. Who only waits, until time is up, holds an inquest.
#pragma once

#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "engine.h"
#include "inquest.h"
#include "peers.h"

namespace dist_prims {

class Far {
public:
    // Tags that users may have; those of the group itself come after.
    static constexpr int kUserTags = 1 << 26;
    // A rank of this host may be held up by one of another: who waits for that one gives up first, and says for whom.
    static constexpr std::chrono::seconds kAfterOthers{2};

    struct Letter {
        Engine::Handle handle;
        int peer;
        bool outgoing;
        std::size_t bytes;
        std::chrono::milliseconds timeout;
        Clock::time_point deadline;
    };
    using Handle = std::shared_ptr<Letter>;

    // `strangers`: the ranks of the group that are on other hosts.
    Far(std::unique_ptr<Engine> engine, Peers& peers, const std::vector<int>& strangers);
    ~Far();
    Far(const Far&) = delete;

    // `number`: of the call, or a part of it, that the message belongs to; alike at both ends.
    Handle send(int to, std::uint64_t number, const std::byte* data, std::size_t bytes,
                std::chrono::milliseconds timeout);
    Handle receive(int from, std::uint64_t number, std::byte* data, std::size_t bytes,
                   std::chrono::milliseconds timeout);
    // Throws if it does not come to its end; the group has ended then. `timeout` counts from `since`, for what was
    // asked for early.
    void wait(const Handle& letter);
    void wait(const Handle& letter, std::chrono::milliseconds timeout, Clock::time_point since);
    // Of what was asked for and does not come any more.
    static void let_go(const Handle& letter) { letter->handle->let_go(); }
    // Wake whoever waits, from another thread: he looks around.
    void wake();

    // The group has ended: tell the other hosts why, and let go of all memory that was given for messages.
    void end();

private:
    struct Word {
        std::int32_t kind, culprit;
    };

    template <typename Begin>
    Handle begin(Letter letter, const Begin& make);
    bool wait_a_while(Letter& letter);
    void hear(const std::optional<Peers::Notice>& notice);
    bool is_over();
    void look_around(const Letter& letter);
    [[noreturn]] void late(const Letter& letter);
    [[noreturn]] void failed(const Letter& letter, const std::string& reason);
    [[noreturn]] void give_up(CommError::Kind kind, int culprit, const Letter& letter, const std::string& reason);
    void learn(std::chrono::milliseconds limit);
    void tell();
    void tick();
    std::string text(const Letter& letter, const std::string& reason) const;

    Peers& peers_;
    const std::vector<int> strangers_;
    const std::unique_ptr<Engine> engine_;
    Word heard_{-1, -1};
    Engine::Handle word_;  // asked for

    std::mutex mutex_;  // of all below
    std::set<Engine::Letter*> waiting_;
    bool ended_ = false, closing_ = false, asleep_ = false;
    Clock::time_point death_seen_{};
    std::condition_variable wakes_;
    std::thread ticker_;  // an engine's wait cannot be told to return now and then: this thread makes it

    const std::shared_ptr<Inquest> inquest_;  // last: it has a thread that wakes who waits; its hook in Peers stays
};

}  // namespace dist_prims
