#include "exit_action.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "process.h"
#include "thread.h"

namespace dist_prims {
namespace {

// The actions of one process.
struct Actions {
    std::mutex mutex;
    std::unordered_map<const ExitAction*, const std::function<void()>*> actions{};
    const int owner = this_process();

    void run() {
        const std::lock_guard lock(mutex);
        for (const auto& [key, act] : actions) caught(*act);
    }
    static void on_exit(int status, void* self) {
        auto& actions = *static_cast<Actions*>(self);
        if (status == 0 && actions.owner == this_process()) actions.run();
    }
};

// The object is never destroyed, since groups may end later than other static objects. It is found without a lock,
// which another thread might hold while this process forks.
Actions& actions_of_this_process() {
    static std::atomic<Actions*> current{nullptr};
    Actions* actions = current.load(std::memory_order_acquire);
    if (actions && actions->owner == this_process()) return *actions;
    auto fresh = std::make_unique<Actions>();
    if (!current.compare_exchange_strong(actions, fresh.get())) return *actions;
    ::on_exit(&Actions::on_exit, fresh.get());
    return *fresh.release();
}

}  // namespace

ExitAction::ExitAction(std::function<void()> act) : act_(std::move(act)), owner_(this_process()) {
    Actions& registered = actions_of_this_process();
    const std::lock_guard lock(registered.mutex);
    registered.actions.emplace(this, &act_);
}

ExitAction::~ExitAction() {
    if (owner_ != this_process()) return;
    Actions& registered = actions_of_this_process();
    const std::lock_guard lock(registered.mutex);
    registered.actions.erase(this);
}

void run_exit_actions() {
    actions_of_this_process().run();
}

}  // namespace dist_prims
