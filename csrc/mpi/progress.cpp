#include "progress.h"

#include <unistd.h>

#include <utility>

#include "poll_backoff.h"

namespace dist_prims::mpi {
namespace {

using namespace std::chrono_literals;

constexpr auto kUntilSleep = 10ms;  // without a message: it takes time to wake a thread
constexpr auto kLongestNap = 1ms;

int on_finalize(MPI_Comm, int, void*, void*) {
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
    const std::lock_guard guard(mpi_lock());
    int key = MPI_KEYVAL_INVALID;
    check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, on_finalize, &key, nullptr), "MPI_Comm_create_keyval");
    check(MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr), "MPI_Comm_set_attr");
}

void Progress::add(const std::shared_ptr<MpiMessage>& message) {
    const std::lock_guard lock(guard_);
    pending_.emplace(message.get(), message);
}

void Progress::remove(const MpiMessage* message) {
    std::shared_ptr<MpiMessage> last;  // its members are destroyed after the lock is released
    const std::lock_guard lock(guard_);
    if (const auto found = pending_.find(message); found != pending_.end()) {
        last = std::move(found->second);
        pending_.erase(found);
    }
}

void Progress::wake() {
    const std::lock_guard lock(guard_);
    if (is_closing_) return;
    last_event_ = Clock::now();
    if (!thread_.has_begun()) thread_ = Thread("this rank: the thread that polls MPI", [this] { run(); });
    if (!is_asleep_) return;
    is_asleep_ = false;
    changed_.notify_all();
}

void Progress::run() {
    std::unique_lock lock(guard_);
    while (!is_closing_) {
        if (pending_.empty() && Clock::now() - last_event_ > kUntilSleep) {
            is_asleep_ = true;
            while (!is_closing_ && is_asleep_) wait_for_notification(changed_, lock);
            continue;
        }
        std::vector<std::shared_ptr<MpiMessage>> unawaited;
        for (const auto& [key, message] : pending_) {
            if (!message->is_awaited()) unawaited.push_back(message);
        }
        lock.unlock();
        bool ended = false;
        for (const auto& message : unawaited) caught([&] { ended |= message->test(); });
        const bool has_unawaited = !unawaited.empty();
        unawaited.clear();
        lock.lock();
        if (ended) last_event_ = Clock::now();
        if (!is_closing_)
            changed_.wait_for(lock, has_unawaited ? poll_interval(Clock::now() - last_event_) : kLongestNap);
    }
}

void Progress::close() {
    if (owner_ != ::getpid()) return;  // a forked child has no thread, and ends nothing
    mark_closed();
    Thread thread;
    {
        const std::lock_guard lock(guard_);
        is_closing_ = true;
        thread = std::move(thread_);
        changed_.notify_all();
    }
    thread.end();
    std::vector<std::shared_ptr<MpiMessage>> pending;
    {
        const std::lock_guard lock(guard_);
        for (const auto& [key, message] : pending_) pending.push_back(message);
    }
    for (const auto& message : pending) message->abandon();
}

void Progress::keep(std::shared_ptr<MpiMessage> message) {
    const std::lock_guard lock(guard_);
    kept_.push_back(std::move(message));
}

}  // namespace dist_prims::mpi
