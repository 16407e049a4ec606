#include "inquest.h"

#include <algorithm>
#include <utility>

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr auto kHearing = 1s;  // for all to say something: they look around every 10 to 100 ms
constexpr auto kBetweenLooks = 20ms;
constexpr auto kForever = std::chrono::milliseconds(24h * 365);  // an engine has no other word for it

}  // namespace

Inquest::Inquest(Engine& engine, int tag, int me, std::vector<int> others, std::function<void()> on_question)
    : engine_(engine),
      tag_(tag),
      me_(me),
      others_(std::move(others)),
      on_question_(std::move(on_question)),
      next_(engine_.receive(Engine::kAnyone, tag_, reinterpret_cast<std::byte*>(&heard_), sizeof(heard_))),
      listener_([this] { listen(); }) {}

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
    sent_.clear();  // and of the engine nothing is kept
    next_.reset();
}

void Inquest::listen() {
    try {
        while (next_->wait(kForever)) {
            if (!take_in()) return;
            is_asked_.store(true, std::memory_order_release);
            on_question_();
        }
    } catch (const std::exception&) {  // the engine has let go: who it was is told otherwise
    }
}

// What has been heard, and ask for the next.
bool Inquest::take_in() {
    const std::lock_guard lock(mutex_);
    awaits_[heard_.rank] = heard_.awaited;
    changed_.notify_all();
    if (!closing_)
        next_ = engine_.receive(Engine::kAnyone, tag_, reinterpret_cast<std::byte*>(&heard_), sizeof(heard_));
    return !closing_;
}

// Once: what this rank waits for does not change any more.
void Inquest::say(int awaited) {
    const std::lock_guard lock(mutex_);
    if (closing_ || said_.rank == me_) return;
    said_ = {me_, awaited};
    awaits_[me_] = awaited;
    for (const int other : others_) {
        try {
            sent_.push_back(engine_.send(other, tag_, reinterpret_cast<const std::byte*>(&said_), sizeof(said_)));
        } catch (const std::exception&) {  // it is gone
        }
    }
}

int Inquest::hold(int awaited, const std::function<bool()>& over) {
    say(awaited);
    std::unique_lock lock(mutex_);
    for (const auto until = Clock::now() + kHearing; !over() && Clock::now() < until;)
        changed_.wait_for(lock, kBetweenLooks);
    return verdict(awaited);
}

// Under the lock. If all who are waited for wait themselves, in a circle, it is the one whom this rank waits for.
int Inquest::verdict(int awaited) const {
    if (!awaits_.count(awaited)) return awaited;
    for (const auto& [rank, whom] : awaits_) {
        if (!awaits_.count(whom)) return whom;
    }
    return awaited;
}

}  // namespace dist_prims
