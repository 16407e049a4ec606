#include "exit_action.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "process.h"

namespace dist_prims {
namespace {

// The actions of one process.
struct Actions {
    std::mutex mutex;
    std::unordered_map<const ExitAction*, const std::function<void()>*> actions{};
    const int owner = this_process();

    static void run(int status, void* self) {
        auto& actions = *static_cast<Actions*>(self);
        if (status != 0 || actions.owner != this_process()) return;
        const std::lock_guard lock(actions.mutex);
        for (const auto& [key, act] : actions.actions) (*act)();
    }
};

// Never destroyed: groups may end later than other static objects. Without a lock, which a forked child might find
// taken.
Actions& actions_of_this_process() {
    static std::atomic<Actions*> current{nullptr};
    Actions* found = current.load(std::memory_order_acquire);
    if (found && found->owner == this_process()) return *found;
    auto made = std::make_unique<Actions>();
    if (!current.compare_exchange_strong(found, made.get())) return *found;
    ::on_exit(&Actions::run, made.get());
    return *made.release();
}

}  // namespace

ExitAction::ExitAction(std::function<void()> act) : act_(std::move(act)), owner_(this_process()) {
    Actions& known = actions_of_this_process();
    const std::lock_guard lock(known.mutex);
    known.actions.emplace(this, &act_);
}

ExitAction::~ExitAction() {
    if (owner_ != this_process()) return;
    Actions& known = actions_of_this_process();
    const std::lock_guard lock(known.mutex);
    known.actions.erase(this);
}

}  // namespace dist_prims
