#include "inquest.h"

#include <set>
#include <utility>

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr auto kHearing = 1s;  // for all to say something: they look around every 10 to 100 ms
constexpr auto kBetweenLooks = 20ms;
constexpr auto kForever = std::chrono::milliseconds(24h * 365);  // an engine has no other word for it

}  // namespace

Inquest::Inquest(Engine& engine, int tag, int me, std::vector<int> others, Heard heard)
    : engine_(engine), tag_(tag), me_(me), others_(std::move(others)), on_heard_(std::move(heard)) {
    ask();  // nobody else is here yet
    listener_ = std::thread([this] { listen(); });
}

Inquest::~Inquest() {
    close();
}

void Inquest::close() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
        if (next_) next_->abort();
    }
    if (listener_.joinable()) listener_.join();
    sent_.clear();  // of the engine nothing is kept
    if (next_) next_->let_go();
    next_.reset();
}

// Under the lock.
void Inquest::ask() {
    next_ = engine_.receive(Engine::kAnyone, tag_, reinterpret_cast<std::byte*>(&heard_), sizeof(heard_));
}

void Inquest::ask_again() {
    for (std::size_t attempt = 0;; ++attempt) {
        try {
            return ask();
        } catch (const std::exception&) {  // gloo tells here of one that has gone, of each once
            if (attempt == others_.size()) throw;
        }
    }
}

void Inquest::listen() {
    try {
        while (next_->wait(kForever)) {
            take_in(heard_);
            const std::lock_guard lock(mutex_);
            if (closing_) return;
            ask_again();
        }
    } catch (const std::exception&) {  // the engine has let go: who it was is told otherwise
    }
}

void Inquest::take_in(const Remark& remark) {
    if (remark.kind != kWaits) return on_heard_(Peers::Notice{static_cast<CommError::Kind>(remark.kind), remark.whom});
    {
        const std::lock_guard lock(mutex_);
        awaits_[remark.rank] = remark.whom;
        changed_.notify_all();
    }
    is_asked_.store(true, std::memory_order_release);
    on_heard_(std::nullopt);
}

void Inquest::send_all(const Remark& remark) {
    for (const int other : others_) {
        try {
            sent_.push_back(engine_.send(other, tag_, reinterpret_cast<const std::byte*>(&remark), sizeof(remark)));
        } catch (const std::exception&) {  // it is gone
        }
    }
}

// Once: what this rank waits for does not change any more.
void Inquest::say(int awaited) {
    const std::lock_guard lock(mutex_);
    if (closing_ || std::exchange(has_said_, true)) return;
    said_ = {me_, awaited, kWaits};
    awaits_[me_] = awaited;
    send_all(said_);
}

void Inquest::tell(const Peers::Notice& notice) {
    const std::lock_guard lock(mutex_);
    if (closing_) return;
    told_ = {me_, notice.culprit, static_cast<std::int32_t>(notice.kind)};
    send_all(told_);
}

int Inquest::hold(int awaited, const std::function<bool()>& over) {
    say(awaited);
    std::unique_lock lock(mutex_);
    const auto until = Clock::now() + kHearing;
    while (!over() && awaits_.size() <= others_.size() && Clock::now() < until) changed_.wait_for(lock, kBetweenLooks);
    return verdict(awaited);
}

// Under the lock. At the end of the chain that begins here; where it is a circle, others know of one who is silent.
int Inquest::verdict(int awaited) const {
    std::set<int> seen;
    for (int each = awaited; seen.insert(each).second;) {
        const auto found = awaits_.find(each);
        if (found == awaits_.end()) return each;
        each = found->second;
    }
    for (const auto& [rank, whom] : awaits_) {
        if (!awaits_.count(whom)) return whom;
    }
    return awaited;
}

}  // namespace dist_prims
