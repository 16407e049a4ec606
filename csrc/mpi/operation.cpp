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

MpiOperation::MpiOperation(std::shared_ptr<MpiGroup> group, Options options, Done done)
    : group_(std::move(group)),
      options_(std::move(options)),
      calls_(group_->comm(), group_->size(), options_.largest_count),
      done_(std::move(done)) {}

void MpiOperation::begin(const std::function<void(Calls&)>& start, bool attended) {
    try {
        const std::lock_guard hold(lock());
        if (const std::string why = unusable(); !why.empty()) std::rethrow_exception(named(why));
        if (const auto failure = group_->failure()) std::rethrow_exception(failure);
        call(start);
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
void MpiOperation::call(const std::function<void(Calls&)>& start) {
    try {
        start(calls_);
    } catch (const Error& error) {
        if (!calls_.give_up()) Progress::instance().keep(shared_from_this(), done_);
        std::rethrow_exception(named(error.what()));
    }
}

bool MpiOperation::test() {
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
bool MpiOperation::over() {
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
    if (!error_ && !options_.is_message && since(begun_) >= options_.timeout)
        group_->fail(error_ = late(options_.timeout));
    if (!error_) return false;
    if (!calls_.give_up()) Progress::instance().keep(shared_from_this(), done_);
    return true;
}

bool MpiOperation::wait(Milliseconds limit, const WaitHook& look) {
    if (limit == Milliseconds::max() && options_.is_message) limit = options_.timeout;
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

std::exception_ptr MpiOperation::late(Milliseconds limit) const {
    return named(std::to_string(limit.count()) +
                     " ms have passed, and a rank has not come or does not go on; the group "
                     "has ended",
                 true);
}

std::exception_ptr MpiOperation::named(const std::string& text, bool timeout) const {
    return std::make_exception_ptr(Error("rank " + std::to_string(group_->rank()) + " of " +
                                             std::to_string(group_->size()) + ", " + options_.what + ": " + text,
                                         timeout));
}

}  // namespace dist_prims::mpi
