// Who is to blame when time is up.
//
// Who has waited for too long knows for whom, but that one may only be waiting in turn. So it tells all ranks for whom
// it waits; whoever hears that while he waits says the same of himself; and to blame is the one at the end of the
// chain, who says nothing.
//
//     rank 0, out of patience    I wait for 1
//     rank 1                               I wait for 2
//     rank 2                     ...                        it is rank 2
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "engine.h"
#include "peers.h"

namespace dist_prims {

class Inquest {
public:
    // Called, on a thread of its own, when another rank has run out of patience, or with why the group has ended: the
    // waits of this rank should look around.
    using Heard = std::function<void(const std::optional<Peers::Notice>&)>;

    // `others`: all ranks of the group but `me`, as the engine counts them.
    Inquest(Engine& engine, int tag, int me, std::vector<int> others, Heard heard);
    ~Inquest();
    Inquest(const Inquest&) = delete;

    // To be called now and then by who waits for `awaited`: if there is a question, say so.
    void answer(int awaited) {
        if (is_asked_.load(std::memory_order_acquire)) say(awaited);
    }
    // This rank has waited for `awaited` for too long. Hear the others, until `over` holds or they have had their time,
    // and return who is to blame.
    int hold(int awaited, const std::function<bool()>& over);
    // The group has ended, and this is why.
    void tell(const Peers::Notice& notice);

    // For good: nothing is said or heard any more.
    void close();

private:
    // Of a rank, for whom it waits; or, with a kind of error, who has ended the group.
    struct Remark {
        std::int32_t rank, whom, kind;
    };
    static constexpr std::int32_t kWaits = -1;

    void say(int awaited);
    void send_all(const Remark& remark);
    void ask();
    void ask_again();
    void listen();
    void take_in(const Remark& remark);
    int verdict(int awaited) const;

    Engine& engine_;
    const int tag_, me_;
    const std::vector<int> others_;
    const Heard on_heard_;
    std::atomic<bool> is_asked_{false};

    std::mutex mutex_;  // of all below
    std::condition_variable changed_;
    Remark said_{}, told_{}, heard_{};
    bool has_said_ = false;
    std::vector<Engine::Handle> sent_;
    Engine::Handle next_;  // remark, asked for; its wait is without the lock
    std::map<int, int> awaits_;
    bool closing_ = false;
    std::thread listener_;
};

}  // namespace dist_prims
