// Timeout diagnosis: which rank is late when a wait for another host times out. The RemotePeers of each rank has one.
//
// A rank that times out knows only which peer it was waiting for, and that peer may itself be blocked. It therefore
// tells all ranks a remark: its wait-for edge. Every other blocked rank replies to all with a remark of its own. The
// culprit is the end of the chain: the rank that never replies.
//
//     rank 0, timed out    waits for 1
//     rank 1                             waits for 2
//     rank 2                                            no reply: rank 2 is late
//
// No rank is late if the link between two hosts drops packets, and the link is then said to be cut. Each rank therefore
// also reports the ranks whose hosts do not answer what it has sent. A link is cut if both ranks reply, and one of them
// reports that the host of the other does not answer. These two ranks cannot reach each other, so the other ranks
// forward their remarks.
//
// In a group of more than kDirect ranks, connections to all other ranks would need too many descriptors. A rank sends
// remarks and notices to its successors only, the ranks at the distances 1, 2, 4, 8, ... after it. Each rank forwards
// what it receives for the first time to its own successors. So every rank receives it within log2(ranks) steps, or on
// a longer way if a rank on the shortest way forwards nothing. If all ranks wait, each rank forwards the remarks of all
// ranks. It therefore sends many of them in one message: after a message it collects remarks for some milliseconds.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "../shm/membership.h"
#include "transport.h"

namespace dist_prims {

class TimeoutDiagnosis {
public:
    static constexpr int kDirect = 64;  // the largest group in which the successors are all other ranks
    using Link = std::pair<int, int>;   // between the hosts of two ranks
    // Called on the listener thread when another rank has timed out, or with the notice when the group has ended. The
    // waits of this rank should then check for failures.
    using Callback = std::function<void(const std::optional<Membership::Notice>&)>;

    // Starts the listener thread. `tag`: of the remarks, and of nothing else. `me`, `others`: this rank, and all other
    // ranks of the group, as the transport numbers them.
    TimeoutDiagnosis(Transport& transport, int tag, int me, std::vector<int> others, Callback callback);
    ~TimeoutDiagnosis();
    TimeoutDiagnosis(const TimeoutDiagnosis&) = delete;

    // Called at intervals by a wait for `awaited`: replies if a diagnosis is in progress.
    void answer(int awaited) {
        if (is_diagnosing_.load(std::memory_order_acquire)) announce(awaited);
    }
    // This rank has timed out waiting for `awaited`. Collects the replies of the others for 1 s (up to 1.8 s on a busy
    // machine), or until `stops` returns true. Returns the cause: the late rank, or the ends of a cut link.
    Membership::Notice diagnose(int awaited, const std::function<bool()>& stops);
    // Tells the cause of the group's end to all other ranks.
    void send_notice(const Membership::Notice& notice);
    // Takes a notice that rank `from` has sent. Returns the same, or a kSilent one if the culprit may be healthy.
    Membership::Notice corrected(const Membership::Notice& notice, int from);
    // Whether send_notice() sends to this rank, rather than other ranks that forward the notice to it.
    bool is_successor(int rank) const;

    // The links that are cut, as far as this rank knows.
    std::vector<Link> cut_links();
    // Ends the diagnosis permanently: nothing is sent or received afterwards.
    void close();

private:
    // The message of a diagnosis. What it says depends on its kind:
    //     kWaits         `rank` waits for `target`
    //     kUnanswered    the host of `target` does not answer what `rank` has sent
    //     0 and above    a notice with this CommError::Kind: `target` is the culprit, `rank` is Notice::other
    struct Remark {
        std::int32_t rank, target, kind;
        auto operator<=>(const Remark&) const = default;
    };
    static constexpr std::int32_t kWaits = -1, kUnanswered = -2, kNone = -3;  // kNone: the message has no more remarks
    static constexpr std::size_t kMostRemarks = 256;                          // of a message
    using Remarks = std::vector<Remark>;

    void announce(int awaited);
    void note_unanswering();
    void report_unanswering();
    void send(int to, const std::shared_ptr<const Remarks>& message);
    void send_to_successors(Remarks remarks);
    void send_new_remarks();
    bool add_remark(const Remark& remark);
    void forward_to_unreachable(const Remark& remark);
    bool sends_to_all() const { return successors_.size() == others_; }
    bool has_replied(int rank) const;
    bool is_cut(int rank, int other) const;
    void post_receive();
    void repost_receive();
    void run_listener();
    void on_message();
    Membership::Notice find_cause(int awaited) const;
    Membership::Notice without_reply(int rank) const;

    Transport& transport_;
    const int tag_, me_;
    const std::size_t others_;  // the number of other ranks
    const std::vector<int> successors_;
    const Callback callback_;
    std::atomic<bool> is_diagnosing_{false};

    std::mutex mutex_;  // of all below
    std::condition_variable changed_;
    Remarks received_;
    std::set<Remark> remarks_;  // of all ranks
    Remarks new_remarks_;       // that this rank has not sent to its successors yet
    bool has_announced_ = false, has_reported_ = false, has_sent_notice_ = false;
    std::vector<Transport::Handle> sent_;
    Transport::Handle remark_request_;  // the receive into received_; the listener waits for it without the lock
    std::map<int, int> awaits_;         // the wait-for edges: rank and target
    std::set<Link> unanswered_;         // the sender, and the rank whose host does not answer
    bool is_closing_ = false;
    std::thread listener_;
};

}  // namespace dist_prims
