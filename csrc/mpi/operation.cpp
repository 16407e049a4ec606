#include "operation.h"

#include <utility>

#include "../common/thread.h"
#include "poll_backoff.h"
#include "progress.h"

namespace dist_prims::mpi {
namespace {

// While it lives, the thread leaves the operation alone.
class Attending {
public:
    explicit Attending(std::atomic<int>& count) : count_(count) { ++count_; }
    ~Attending() { --count_; }
    Attending(const Attending&) = delete;
    Attending& operator=(const Attending&) = delete;

private:
    std::atomic<int>& count_;
};

Milliseconds since(Clock::time_point start) {
    return std::chrono::duration_cast<Milliseconds>(Clock::now() - start);
}

}  // namespace

Operation::Operation(std::shared_ptr<Group> group, std::string what, bool is_message, Milliseconds timeout,
                     std::size_t largest_count, Done done)
    : group_(std::move(group)),
      what_(std::move(what)),
      is_message_(is_message),
      timeout_(timeout),
      calls_(group_->comm(), group_->size(), largest_count),
      done_(std::move(done)) {}

void Operation::begin(const std::function<void(Calls&)>& calls, bool attended) {
    try {
        const std::lock_guard hold(lock());
        if (const std::string why = unusable(); !why.empty()) std::rethrow_exception(named(why));
        if (const auto failure = group_->failure()) std::rethrow_exception(failure);
        start(calls);
    } catch (...) {
        state_ = kEnded;
        done_ = nullptr;  // it holds what holds us
        throw;
    }
    if (!attended && test()) return;
    Progress::instance().add(shared_from_this());
    if (!attended) Progress::instance().wake();
}

// Called under the lock.
void Operation::start(const std::function<void(Calls&)>& calls) {
    try {
        calls(calls_);
    } catch (const Error& error) {
        if (!calls_.give_up()) Progress::instance().keep(shared_from_this(), done_);
        std::rethrow_exception(named(error.what()));
    }
}

bool Operation::test() {
    {
        const std::lock_guard hold(lock());
        if (state_ != kUnderWay) return state_ == kEnded;
        if (!over()) return false;
        state_ = kEnding;
    }
    Progress::instance().remove(this);
    const Done done = std::exchange(done_, nullptr);  // it may hold what holds us
    std::function<void()> tell;
    caught([&] { tell = done(error_); });
    state_ = kEnded;
    if (tell) caught(tell);
    return true;
}

// Called under the lock.
bool Operation::over() {
    if (closed()) {
        error_ = named("the process is about to end, or MPI to be finalised, before this is done");
    } else {
        try {
            if (calls_.test()) {
                source_ = calls_.source();
                return true;
            }
            error_ = group_->failure();
        } catch (const Error& error) {
            error_ = named(error.what());
        }
    }
    if (!error_ && !is_message_ && since(begun_) >= timeout_) group_->fail(error_ = late(timeout_));
    if (!error_) return false;
    if (!calls_.give_up()) Progress::instance().keep(shared_from_this(), done_);
    return true;
}

bool Operation::wait(Milliseconds limit, const WaitHook& look) {
    if (limit == Milliseconds::max() && is_message_) limit = timeout_;
    const auto start = Clock::now();
    PollBackoff backoff;
    try {
        const Attending here(attended_);
        while (!test()) {
            if (woken_.exchange(false)) return false;
            if (state_ == kUnderWay && since(start) >= limit) group_->fail(late(limit));
            backoff.pause(look);
        }
    } catch (...) {
        Progress::instance().wake();
        throw;
    }
    return true;
}

std::exception_ptr Operation::late(Milliseconds limit) const {
    return named(std::to_string(limit.count()) +
                     " ms have passed, and a rank has not come or does not go on; the group "
                     "has ended",
                 true);
}

std::exception_ptr Operation::named(const std::string& text, bool timeout) const {
    return std::make_exception_ptr(Error(
        "rank " + std::to_string(group_->rank()) + " of " + std::to_string(group_->size()) + ", " + what_ + ": " + text,
        timeout));
}

}  // namespace dist_prims::mpi
