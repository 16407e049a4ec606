// A rank takes part in a diagnosis from two sides. diagnose() and answer() run in a thread that waits for a message of
// the group, and send the remarks of this rank. The listener thread receives the remarks of other ranks.
#include "timeout_diagnosis.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "../common/thread.h"

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr auto kReplyTime = 1s;  // for all replies: waits check for a diagnosis every 10 to 100 ms
constexpr auto kBetweenLooks = 20ms;
constexpr int kLooks = kReplyTime / kBetweenLooks;
constexpr auto kLongestReplyTime = 1800ms;                    // less than RemotePeers::kLocalMargin
constexpr auto kCollecting = 10ms;                            // log2(ranks) times this is a small part of kReplyTime
constexpr auto kYear = std::chrono::milliseconds(24h * 365);  // transports have no infinite timeout

std::vector<int> successors_of(int me, std::vector<int> others) {
    const int size = static_cast<int>(others.size()) + 1;
    if (size > TimeoutDiagnosis::kDirect) {
        std::erase_if(others, [&](int other) {
            const auto distance = static_cast<unsigned>((other - me + size) % size);
            return !std::has_single_bit(distance);
        });
    }
    return others;
}

}  // namespace

TimeoutDiagnosis::TimeoutDiagnosis(Transport& transport, int tag, int me, std::vector<int> others, Callback callback)
    : transport_(transport),
      tag_(tag),
      me_(me),
      others_(others.size()),
      successors_(successors_of(me, std::move(others))),
      callback_(std::move(callback)) {
    post_receive();  // no other thread is running yet
    listener_ = start_thread("rank " + std::to_string(me) + ": the thread of the timeout diagnosis",
                             [this] { run_listener(); });
}

TimeoutDiagnosis::~TimeoutDiagnosis() {
    close();
}

void TimeoutDiagnosis::close() {
    {
        const std::lock_guard lock(mutex_);
        is_closing_ = true;
        if (remark_request_) remark_request_->abort();
    }
    if (listener_.joinable()) listener_.join();
    sent_.clear();  // all requests must be destroyed before the transport
    remark_request_.reset();
}

// Under the lock.
void TimeoutDiagnosis::post_receive() {
    received_.assign(kMostRemarks, {-1, -1, kNone});
    remark_request_ = transport_.receive(Transport::kAnyone, tag_, reinterpret_cast<std::byte*>(received_.data()),
                                         kMostRemarks * sizeof(Remark));
}

// Under the lock. A transport may report here each rank that has gone, once.
void TimeoutDiagnosis::repost_receive() {
    for (std::size_t attempt = 0;; ++attempt) {
        try {
            return post_receive();
        } catch (const std::exception&) {
            if (attempt == others_) throw;
        }
    }
}

void TimeoutDiagnosis::run_listener() {
    try {
        for (;;) {
            // A wait ends without a message by close(), and when a debugger or SIGCONT continues a stopped process.
            const bool has_come = remark_request_->wait(kYear);
            if (has_come) on_message();
            {
                const std::lock_guard lock(mutex_);
                if (is_closing_) return;
                if (!has_come) continue;
                repost_receive();
                if (remark_request_->is_done()) continue;  // send the remarks of the next message with these
                send_new_remarks();
            }
            if (!sends_to_all()) std::this_thread::sleep_for(kCollecting);
        }
    } catch (const std::exception&) {  // the transport has ended; the cause is reported elsewhere
    }
}

// On the listener thread. A notice is alone in its message.
void TimeoutDiagnosis::on_message() {
    if (const Remark& remark = received_.front(); remark.kind >= 0) {
        const Membership::Notice notice{static_cast<CommError::Kind>(remark.kind), remark.target, remark.rank};
        if (!sends_to_all()) send_notice(notice);
        return callback_(corrected(notice, remark_request_->source()));
    }
    {
        const std::lock_guard lock(mutex_);
        if (is_closing_) return;
        bool is_news = false;
        for (const Remark& remark : received_) {
            if (remark.kind != kNone && add_remark(remark)) is_news = true;
        }
        if (!is_news) return;
        report_unanswering();
        changed_.notify_all();
    }
    callback_(std::nullopt);
}

// If the notice names a rank as late although this rank has received its reply, the reply has not reached `from`: one
// of the two ranks may be cut off. In a group of more than kDirect ranks `from` may only have forwarded the notice, so
// it is not known which rank the reply has not reached.
Membership::Notice TimeoutDiagnosis::corrected(const Membership::Notice& notice, int from) {
    const std::lock_guard lock(mutex_);
    const bool names_a_rank = notice.kind == CommError::Kind::kLost && notice.other < 0;
    if (!names_a_rank || !sends_to_all() || !awaits_.count(notice.culprit)) return notice;
    return {CommError::Kind::kSilent, notice.culprit, from};
}

// Under the lock. Returns false if the remark is known.
bool TimeoutDiagnosis::add_remark(const Remark& remark) {
    if (!remarks_.insert(remark).second) return false;
    if (remark.kind == kWaits) {
        awaits_[remark.rank] = remark.target;
        is_diagnosing_.store(true, std::memory_order_release);
    }
    if (remark.kind == kUnanswered) unanswered_.insert({remark.rank, remark.target});
    if (remark.rank == me_ || !sends_to_all()) new_remarks_.push_back(remark);
    if (sends_to_all()) forward_to_unreachable(remark);
    return true;
}

// Under the lock, where ranks send to all others. Two ranks between which data is not answered may not receive each
// other's remarks, so other ranks forward all remarks of the two if `remark` reports such a pair, or `remark` if its
// rank belongs to a known pair.
void TimeoutDiagnosis::forward_to_unreachable(const Remark& remark) {
    const auto send_one = [this](int to, const Remark& one) { send(to, std::make_shared<const Remarks>(1, one)); };
    const auto forward_between = [&](int from, int to) {
        for (const auto kind : {kUnanswered, kWaits}) {  // in this order: see announce()
            for (const Remark& known : remarks_) {
                if (known.kind == kind && known.rank == from && to != me_ && from != me_) send_one(to, known);
            }
        }
    };
    if (remark.kind == kUnanswered) {
        forward_between(remark.rank, remark.target);
        forward_between(remark.target, remark.rank);
    } else if (remark.rank != me_) {
        for (const auto& [rank, other] : unanswered_) {
            if (rank == remark.rank && other != me_) send_one(other, remark);
            if (other == remark.rank && rank != me_) send_one(rank, remark);
        }
    }
}

// Under the lock.
void TimeoutDiagnosis::send(int to, const std::shared_ptr<const Remarks>& message) {
    try {
        const auto* data = reinterpret_cast<const std::byte*>(message->data());
        auto request = transport_.send(to, tag_, data, message->size() * sizeof(Remark), message);
        if (!request->is_done()) sent_.push_back(std::move(request));
    } catch (const std::exception&) {  // the rank has gone
    }
}

// Under the lock.
void TimeoutDiagnosis::send_to_successors(Remarks remarks) {
    const auto message = std::make_shared<const Remarks>(std::move(remarks));
    for (const int successor : successors_) send(successor, message);
}

// Under the lock.
void TimeoutDiagnosis::send_new_remarks() {
    for (std::size_t begin = 0, end; begin < new_remarks_.size(); begin = end) {
        end = std::min(begin + kMostRemarks, new_remarks_.size());
        send_to_successors(Remarks(new_remarks_.data() + begin, new_remarks_.data() + end));
    }
    new_remarks_.clear();
}

// Under the lock. Notes for this rank which hosts do not answer; report_unanswering() tells the other ranks.
void TimeoutDiagnosis::note_unanswering() {
    for (const int rank : transport_.unanswering()) unanswered_.insert({me_, rank});
}

// Under the lock. A rank that waits for no other rank may have sent data that is not answered, too.
void TimeoutDiagnosis::report_unanswering() {
    if (std::exchange(has_reported_, true)) return;
    for (const int rank : transport_.unanswering()) add_remark({me_, rank, kUnanswered});
}

// Sends this rank's edge once. Its wait does not change any more, unless it is rank 0 in a monitored barrier, which
// waits for one rank after the other.
void TimeoutDiagnosis::announce(int awaited) {
    const std::lock_guard lock(mutex_);
    if (is_closing_ || std::exchange(has_announced_, true)) return;
    report_unanswering();  // first, so that a rank that receives the edge has received this report as well
    add_remark({me_, awaited, kWaits});
    send_new_remarks();
}

void TimeoutDiagnosis::send_notice(const Membership::Notice& notice) {
    const std::lock_guard lock(mutex_);
    if (is_closing_ || std::exchange(has_sent_notice_, true)) return;
    send_to_successors({{notice.other, notice.culprit, static_cast<std::int32_t>(notice.kind)}});
}

bool TimeoutDiagnosis::is_successor(int rank) const {
    return std::find(successors_.begin(), successors_.end(), rank) != successors_.end();
}

Membership::Notice TimeoutDiagnosis::diagnose(int awaited, const std::function<bool()>& stops) {
    announce(awaited);
    const auto until = Clock::now() + kLongestReplyTime;
    int looks = 0;  // on a busy machine a look takes longer, as replies do
    const auto all_have_replied = [this] { return awaits_.size() > others_; };  // awaits_ has this rank, too
    for (bool done = false; !done;) {
        // stops() is called without the lock: it may run a signal handler, which may end the group.
        done = stops() || looks >= kLooks || Clock::now() >= until;
        std::unique_lock lock(mutex_);
        done = done || all_have_replied();
        if (!done) looks += changed_.wait_for(lock, kBetweenLooks) == std::cv_status::timeout;
    }
    const std::lock_guard lock(mutex_);
    note_unanswering();  // the remarks of this rank may not have been answered
    return find_cause(awaited);
}

// Under the lock.
bool TimeoutDiagnosis::has_replied(int rank) const {
    return rank == me_ || std::any_of(remarks_.begin(), remarks_.end(),
                                      [&](const Remark& known) { return known.kind < 0 && known.rank == rank; });
}

// Under the lock. Whether the link between two ranks is cut, and not one of the ranks dead.
bool TimeoutDiagnosis::is_cut(int rank, int other) const {
    return (unanswered_.count({rank, other}) || unanswered_.count({other, rank})) && has_replied(rank) &&
           has_replied(other);
}

// Under the lock. The cause if `rank` has not replied. If its host has not answered another rank either, one of the two
// is cut off, and the notice names both. A notice that named `rank` alone could come from a rank that is cut off, and
// reach all others first as the link heals: they would blame a healthy rank.
Membership::Notice TimeoutDiagnosis::without_reply(int rank) const {
    for (const auto& [other, target] : unanswered_) {
        if (target == rank && has_replied(other)) return {CommError::Kind::kSilent, rank, other};
    }
    return {CommError::Kind::kLost, rank};
}

// Under the lock. The cause of the timeout, according to the remarks. Ranks with the same remarks find the same cause.
Membership::Notice TimeoutDiagnosis::find_cause(int awaited) const {
    // 1. A rank waits for another, and the link between them is cut.
    std::set<Link> cut;
    for (const auto& [rank, target] : awaits_) {
        if (is_cut(rank, target)) cut.insert(std::minmax(rank, target));
    }
    if (!cut.empty()) return {CommError::Kind::kUnreachable, cut.begin()->second, cut.begin()->first};
    // 2. Follow the chain of waits to its end, the rank that has not replied, or until it meets itself.
    std::set<int> chain;
    int last = awaited;
    for (; chain.insert(last).second; last = awaits_.at(last)) {
        if (!awaits_.count(last)) return without_reply(last);
    }
    // 3. A circle, of which an edge may be out of date (see announce()). Look for a rank outside it without a reply.
    for (const auto& [rank, target] : awaits_) {
        if (!awaits_.count(target)) return without_reply(target);
    }
    // 4. A deadlock. Name its lowest rank, and the rank for which that one waits.
    int first = last;
    for (int member = awaits_.at(last); member != last; member = awaits_.at(member)) first = std::min(first, member);
    return {CommError::Kind::kLost, first, awaits_.at(first)};
}

std::vector<TimeoutDiagnosis::Link> TimeoutDiagnosis::cut_links() {
    const std::lock_guard lock(mutex_);
    note_unanswering();  // since report_unanswering()
    std::vector<Link> cut;
    for (const auto& [rank, other] : unanswered_) {
        if (is_cut(rank, other)) cut.push_back({rank, other});
    }
    return cut;
}

}  // namespace dist_prims
