#include "timeout_diagnosis.h"

#include <set>
#include <utility>

#include "../common/thread.h"

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr auto kReplyTime = 1s;  // for all replies: waits check for a diagnosis every 10 to 100 ms
constexpr auto kBetweenLooks = 20ms;
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
    if (remark.kind != kWaits)
        return callback_(Membership::Notice{static_cast<CommError::Kind>(remark.kind), remark.target});
    {
        const std::lock_guard lock(mutex_);
        awaits_[remark.rank] = remark.target;
        changed_.notify_all();
    }
    is_diagnosing_.store(true, std::memory_order_release);
    callback_(std::nullopt);
}

void TimeoutDiagnosis::send_all(const Remark& remark) {
    for (const int other : others_) {
        try {
            sent_.push_back(transport_.send(other, tag_, reinterpret_cast<const std::byte*>(&remark), sizeof(remark)));
        } catch (const std::exception&) {  // it is gone
        }
    }
}

// Sends this rank's edge once. Its wait does not change any more, unless it is rank 0 in a monitored barrier, which
// waits for one rank after the other.
void TimeoutDiagnosis::announce(int awaited) {
    const std::lock_guard lock(mutex_);
    if (closing_ || std::exchange(has_announced_, true)) return;
    announcement_ = {me_, awaited, kWaits};
    awaits_[me_] = awaited;
    send_all(announcement_);
}

void TimeoutDiagnosis::send_notice(const Membership::Notice& notice) {
    const std::lock_guard lock(mutex_);
    if (closing_) return;
    notice_ = {me_, notice.culprit, static_cast<std::int32_t>(notice.kind)};
    send_all(notice_);
}

int TimeoutDiagnosis::diagnose(int awaited, const std::function<bool()>& over) {
    announce(awaited);
    const auto until = Clock::now() + kReplyTime;
    const auto all_have_replied = [this] { return awaits_.size() > others_.size(); };
    for (bool done = false; !done;) {
        done =
            over() || Clock::now() >= until;  // without the lock: it may run a signal handler, which may end the group
        std::unique_lock lock(mutex_);
        done = done || all_have_replied();
        if (!done) changed_.wait_for(lock, kBetweenLooks);
    }
    const std::lock_guard lock(mutex_);
    return verdict(awaited);
}

// Under the lock. Returns the end of the chain that begins here. If the chain is a cycle, returns any awaited rank that
// has not replied.
int TimeoutDiagnosis::verdict(int awaited) const {
    std::set<int> seen;
    for (int each = awaited; seen.insert(each).second;) {
        const auto found = awaits_.find(each);
        if (found == awaits_.end()) return each;
        each = found->second;
    }
    for (const auto& [rank, target] : awaits_) {
        if (!awaits_.count(target)) return target;
    }
    return awaited;
}

}  // namespace dist_prims
