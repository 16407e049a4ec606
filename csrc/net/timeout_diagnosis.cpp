#include "timeout_diagnosis.h"

#include <algorithm>
#include <utility>

#include "../common/thread.h"

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr auto kReplyTime = 1s;  // for all replies: waits check for a diagnosis every 10 to 100 ms
constexpr auto kBetweenLooks = 20ms;
constexpr int kLooks = kReplyTime / kBetweenLooks;
constexpr auto kLongestReplyTime = 1800ms;                       // less than RemotePeers::kLocalMargin
constexpr auto kForever = std::chrono::milliseconds(24h * 365);  // transports have no infinite timeout

}  // namespace

TimeoutDiagnosis::TimeoutDiagnosis(Transport& transport, int tag, int me, std::vector<int> others, Callback callback)
    : transport_(transport), tag_(tag), me_(me), others_(std::move(others)), callback_(std::move(callback)) {
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
        closing_ = true;
        if (next_) next_->abort();
    }
    if (listener_.joinable()) listener_.join();
    sent_.clear();  // all requests go before the transport
    next_.reset();
}

// Under the lock.
void TimeoutDiagnosis::post_receive() {
    next_ = transport_.receive(Transport::kAnyone, tag_, reinterpret_cast<std::byte*>(&received_), sizeof(received_));
}

void TimeoutDiagnosis::repost_receive() {
    for (std::size_t attempt = 0;; ++attempt) {
        try {
            return post_receive();
        } catch (const std::exception&) {  // a transport may report here each rank that has gone, once
            if (attempt == others_.size()) throw;
        }
    }
}

void TimeoutDiagnosis::run_listener() {
    try {
        while (next_->wait(kForever)) {
            on_remark(received_);
            const std::lock_guard lock(mutex_);
            if (closing_) return;
            repost_receive();
        }
    } catch (const std::exception&) {  // the transport has ended; the cause is reported elsewhere
    }
}

void TimeoutDiagnosis::on_remark(const Remark& remark) {
    if (remark.kind >= 0)
        return callback_(Membership::Notice{static_cast<CommError::Kind>(remark.kind), remark.target, remark.rank});
    {
        const std::lock_guard lock(mutex_);
        if (closing_ || !note(remark)) return;
        report_unanswering();
        changed_.notify_all();
    }
    if (remark.kind == kWaits) is_diagnosing_.store(true, std::memory_order_release);
    callback_(std::nullopt);
}

// Under the lock. Returns false if the remark is known.
bool TimeoutDiagnosis::note(const Remark& remark) {
    if (!known_.insert(remark).second) return false;
    if (remark.kind == kWaits) awaits_[remark.rank] = remark.target;
    if (remark.kind == kUnanswered) unanswered_.insert({remark.rank, remark.target});
    forward(remark);
    return true;
}

// Under the lock. Forwards the remarks of the two ranks of a link that does not deliver to each other.
void TimeoutDiagnosis::forward(const Remark& remark) {
    const auto forward_between = [&](int from, int to) {
        for (const auto kind : {kUnanswered, kWaits}) {  // in this order: see announce()
            for (const Remark& each : known_) {
                if (each.kind == kind && each.rank == from && to != me_ && from != me_) send(to, each);
            }
        }
    };
    if (remark.kind == kUnanswered) {
        forward_between(remark.rank, remark.target);
        forward_between(remark.target, remark.rank);
    } else if (remark.rank != me_) {
        for (const auto& [rank, other] : unanswered_) {
            if (rank == remark.rank && other != me_) send(other, remark);
            if (other == remark.rank && rank != me_) send(rank, remark);
        }
    }
}

// Under the lock. The remark must stay.
void TimeoutDiagnosis::send(int to, const Remark& remark) {
    try {
        const auto& kept = *known_.insert(remark).first;
        sent_.push_back(transport_.send(to, tag_, reinterpret_cast<const std::byte*>(&kept), sizeof(kept)));
    } catch (const std::exception&) {  // it is gone
    }
}

void TimeoutDiagnosis::send_all(const Remark& remark) {
    for (const int other : others_) send(other, remark);
}

// Under the lock. Also a rank that waits for no other one may have sent what is not answered.
void TimeoutDiagnosis::report_unanswering() {
    if (std::exchange(has_reported_, true)) return;
    for (const int rank : transport_.unanswering()) {
        const Remark remark{me_, rank, kUnanswered};
        if (note(remark)) send_all(remark);
    }
}

// Sends this rank's edge once. Its wait does not change any more, unless it is rank 0 in a monitored barrier, which
// waits for one rank after the other.
void TimeoutDiagnosis::announce(int awaited) {
    const std::lock_guard lock(mutex_);
    if (closing_ || std::exchange(has_announced_, true)) return;
    report_unanswering();  // first: who knows the edge knows this too
    const Remark remark{me_, awaited, kWaits};
    note(remark);
    send_all(remark);
}

void TimeoutDiagnosis::send_notice(const Membership::Notice& notice) {
    const std::lock_guard lock(mutex_);
    if (!closing_) send_all({notice.other, notice.culprit, static_cast<std::int32_t>(notice.kind)});
}

Membership::Notice TimeoutDiagnosis::diagnose(int awaited, const std::function<bool()>& over) {
    announce(awaited);
    const auto until = Clock::now() + kLongestReplyTime;
    int looks = 0;  // on a busy machine a look takes longer, as replies do
    const auto all_have_replied = [this] { return awaits_.size() > others_.size(); };
    for (bool done = false; !done;) {
        // without the lock: it may run a signal handler, which may end the group
        done = over() || looks >= kLooks || Clock::now() >= until;
        std::unique_lock lock(mutex_);
        done = done || all_have_replied();
        if (!done) looks += changed_.wait_for(lock, kBetweenLooks) == std::cv_status::timeout;
    }
    const std::lock_guard lock(mutex_);
    return verdict(awaited);
}

// Under the lock.
bool TimeoutDiagnosis::has_replied(int rank) const {
    return rank == me_ || std::any_of(known_.begin(), known_.end(),
                                      [&](const Remark& each) { return each.kind < 0 && each.rank == rank; });
}

// Under the lock. Whether both ranks live, and the link between their hosts does not deliver.
bool TimeoutDiagnosis::is_cut(int rank, int other) const {
    return (unanswered_.count({rank, other}) || unanswered_.count({other, rank})) && has_replied(rank) &&
           has_replied(other);
}

// Under the lock. Ranks that know the same come to the same verdict.
Membership::Notice TimeoutDiagnosis::verdict(int awaited) const {
    std::set<Link> cut;
    for (const auto& [rank, target] : awaits_) {
        if (is_cut(rank, target)) cut.insert(std::minmax(rank, target));
    }
    if (!cut.empty()) return {CommError::Kind::kUnreachable, cut.begin()->second, cut.begin()->first};
    std::set<int> chain;  // from the awaited rank to its end, or until it meets itself
    int last = awaited;
    for (; chain.insert(last).second; last = awaits_.at(last)) {
        if (!awaits_.count(last)) return {CommError::Kind::kLost, last};
    }
    for (const auto& [rank, target] : awaits_) {  // an edge of the circle may be out of date: see announce()
        if (!awaits_.count(target)) return {CommError::Kind::kLost, target};
    }
    int first = last;  // of the circle
    for (int each = awaits_.at(last); each != last; each = awaits_.at(each)) first = std::min(first, each);
    return {CommError::Kind::kLost, first, awaits_.at(first)};
}

std::vector<TimeoutDiagnosis::Link> TimeoutDiagnosis::cut_links() {
    const std::lock_guard lock(mutex_);
    for (const int rank : transport_.unanswering()) unanswered_.insert({me_, rank});  // more than at the report
    std::vector<Link> found;
    for (const auto& [rank, other] : unanswered_) {
        if (is_cut(rank, other)) found.push_back({rank, other});
    }
    return found;
}

}  // namespace dist_prims
