#include "progress.h"

#include <unistd.h>

#include <utility>

#include "poll_backoff.h"

namespace dist_prims::mpi {
namespace {

using namespace std::chrono_literals;

constexpr auto kUntilSleep = 10ms;  // without a message; to be woken is not for nothing
constexpr auto kLongestNap = 1ms;

int before_the_end(MPI_Comm, int, void*, void*) {
    Progress::instance().close();
    return MPI_SUCCESS;
}

}  // namespace

// Never destroyed: threads may still use it while the process exits.
Progress& Progress::instance() {
    static Progress& one = *std::make_unique<Progress>().release();
    return one;
}

// MPI_Finalize first deletes the attributes of MPI_COMM_SELF. That is the last moment at which messages can be ended,
// and it comes no matter which library calls MPI_Finalize.
Progress::Progress() : owner_(::getpid()) {
    const std::lock_guard hold(lock());
    int key = MPI_KEYVAL_INVALID;
    check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, before_the_end, &key, nullptr), "MPI_Comm_create_keyval");
    check(MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr), "MPI_Comm_set_attr");
}

void Progress::add(const std::shared_ptr<MpiMessage>& message) {
    const std::lock_guard hold(guard_);
    pending_.emplace(message.get(), message);
}

void Progress::remove(const MpiMessage* message) {
    std::shared_ptr<MpiMessage> last;  // its members are destroyed after the lock is released
    const std::lock_guard hold(guard_);
    if (const auto found = pending_.find(message); found != pending_.end()) {
        last = std::move(found->second);
        pending_.erase(found);
    }
}

void Progress::wake() {
    const std::lock_guard hold(guard_);
    if (closing_) return;
    event_ = Clock::now();
    if (!thread_.has_begun()) thread_ = Thread("this rank: the thread that polls MPI", [this] { run(); });
    if (!asleep_) return;
    asleep_ = false;
    awaken_.notify_all();
}

void Progress::run() {
    std::unique_lock hold(guard_);
    while (!closing_) {
        if (pending_.empty() && Clock::now() - event_ > kUntilSleep) {
            asleep_ = true;
            while (!closing_ && asleep_) wait_for_notification(awaken_, hold);
            continue;
        }
        std::vector<std::shared_ptr<MpiMessage>> unawaited;
        for (const auto& [key, message] : pending_) {
            if (!message->is_awaited()) unawaited.push_back(message);
        }
        hold.unlock();
        bool ended = false;
        for (const auto& message : unawaited) caught([&] { ended |= message->test(); });
        const bool any = !unawaited.empty();
        unawaited.clear();
        hold.lock();
        if (ended) event_ = Clock::now();
        if (!closing_) awaken_.wait_for(hold, any ? poll_interval(Clock::now() - event_) : kLongestNap);
    }
}

void Progress::close() {
    if (owner_ != ::getpid()) return;  // a forked child has no thread, and ends nothing
    mark_closed();
    Thread thread;
    {
        const std::lock_guard hold(guard_);
        closing_ = true;
        thread = std::move(thread_);
        awaken_.notify_all();
    }
    thread.end();
    std::vector<std::shared_ptr<MpiMessage>> left;
    {
        const std::lock_guard hold(guard_);
        for (const auto& [key, message] : pending_) left.push_back(message);
    }
    for (const auto& message : left) message->abandon();
}

void Progress::keep(std::shared_ptr<MpiMessage> message) {
    const std::lock_guard hold(guard_);
    kept_.push_back(std::move(message));
}

}  // namespace dist_prims::mpi
