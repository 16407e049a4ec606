#include "far.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace dist_prims {
namespace {

using namespace std::chrono_literals;

constexpr int kWordTag = Far::kUserTags, kNobodysTag = kWordTag + 1, kInquestTag = kWordTag + 2,
              kFirstTag = kWordTag + 3;
constexpr std::uint64_t kTags = (1u << 27) - static_cast<std::uint64_t>(kFirstTag);
constexpr auto kTimeToTell = 100ms, kTimeToLearn = 300ms;
constexpr auto kTick = 50ms;
constexpr int kIdleTicks = 20;
constexpr auto kMomentToFinish = 500ms;  // a rank that has died may have done its part
constexpr auto kMorePatience = 1min;     // an engine that runs out of it lets all connections go: we are to be first

// All ranks of the group but this one.
std::vector<int> others(const Peers& peers, std::vector<int> strangers) {
    for (int peer = 0; peer < peers.size(); ++peer) {
        if (peer != peers.rank()) strangers.push_back(peers.number(peer));
    }
    return strangers;
}

int tag_of(std::uint64_t number) {
    return kFirstTag + static_cast<int>(number % kTags);
}

}  // namespace

Far::Far(std::unique_ptr<Engine> engine, Peers& peers, const std::vector<int>& strangers)
    : peers_(peers),
      strangers_(strangers),
      engine_(std::move(engine)),
      word_(engine_->receive(Engine::kAnyone, kWordTag, reinterpret_cast<std::byte*>(&heard_), sizeof(heard_))),
      inquest_(std::make_shared<Inquest>(*engine_, kInquestTag, peers.number(peers.rank()), others(peers, strangers),
                                         [this](const auto& notice) { hear(notice); })) {
    peers_.on_look([inquest = inquest_](int awaited) { inquest->answer(awaited); });
}

Far::~Far() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
        wakes_.notify_all();
    }
    if (ticker_.joinable()) ticker_.join();
    inquest_->close();
    word_->let_go();
}

// Make long waits return, so that who waits looks around. It sleeps when there has been none for a while: to be woken
// for each short one would cost more than the wait.
void Far::tick() {
    std::unique_lock lock(mutex_);
    for (int idle = 0; !closing_;) {
        if (idle == kIdleTicks) {
            asleep_ = true;
            wakes_.wait(lock, [this] { return closing_ || !asleep_; });
        }
        const auto before = waiting_;
        wakes_.wait_for(lock, kTick, [this] { return closing_; });
        for (Engine::Letter* letter : waiting_) {
            if (before.count(letter)) letter->abort();
        }
        idle = waiting_.empty() ? idle % kIdleTicks + 1 : 0;
    }
}

void Far::hear(const std::optional<Peers::Notice>& notice) {
    if (notice) peers_.give_notice(notice->kind, notice->culprit);
    wake();
}

void Far::wake() {
    const std::lock_guard lock(mutex_);
    for (Engine::Letter* letter : waiting_) letter->abort();
}

template <typename Begin>
Far::Handle Far::begin(Letter letter, const Begin& make) {
    letter.deadline = Clock::now() + letter.timeout;
    std::string reason;
    try {
        letter.handle = make();
        return std::make_shared<Letter>(std::move(letter));
    } catch (const Engine::Broken& error) {
        reason = error.what();
    }
    failed(letter, reason);
}

Far::Handle Far::send(int to, std::uint64_t number, const std::byte* data, std::size_t bytes,
                      std::chrono::milliseconds timeout) {
    return begin({nullptr, to, true, bytes, timeout, {}},
                 [&] { return engine_->send(to, tag_of(number), data, bytes); });
}

Far::Handle Far::receive(int from, std::uint64_t number, std::byte* data, std::size_t bytes,
                         std::chrono::milliseconds timeout) {
    return begin({nullptr, from, false, bytes, timeout, {}},
                 [&] { return engine_->receive(from, tag_of(number), data, bytes); });
}

void Far::wait(const Handle& letter) {
    for (bool is_due = false;;) {
        std::string reason;
        try {
            if (wait_a_while(*letter)) return;
        } catch (const Engine::Broken& error) {
            reason = error.what();
        } catch (...) {  // Ctrl-C
            peers_.give_notice(CommError::Kind::kInterrupted, peers_.number(peers_.rank()));
            throw;
        }
        if (!reason.empty()) failed(*letter, reason);
        look_around(*letter);
        // An aborted wait does not tell that the message is there: this rank may have stood still, and it come.
        if (Clock::now() >= letter->deadline && std::exchange(is_due, true)) late(*letter);
    }
}

void Far::wait(const Handle& letter, std::chrono::milliseconds timeout, Clock::time_point since) {
    letter->timeout = timeout;
    letter->deadline = since + timeout;
    wait(letter);
}

bool Far::wait_a_while(Letter& letter) {
    struct Waiting {
        Far& far;
        Engine::Letter* letter;
        Waiting(Far& far, Engine::Letter* letter) : far(far), letter(letter) {
            const std::lock_guard lock(far.mutex_);
            if (!far.ticker_.joinable()) far.ticker_ = std::thread([&far] { far.tick(); });
            if (std::exchange(far.asleep_, false)) far.wakes_.notify_all();
            far.waiting_.insert(letter);
        }
        ~Waiting() {
            const std::lock_guard lock(far.mutex_);
            far.waiting_.erase(letter);
        }
    } waiting(*this, letter.handle.get());
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(letter.deadline - Clock::now());
    return letter.handle->wait(std::max(left, 0ms) + kMorePatience);
}

bool Far::is_over() {
    if (!peers_.notice() && word_->is_done()) learn(1ms);
    return peers_.notice().has_value();
}

void Far::look_around(const Letter& letter) {
    is_over();
    inquest_->answer(letter.peer);
    if (const int culprit = peers_.dead(); culprit >= 0 && !peers_.notice()) {
        const std::lock_guard lock(mutex_);
        const auto now = Clock::now();
        if (death_seen_ == Clock::time_point{}) death_seen_ = now;
        if (now - death_seen_ > kMomentToFinish) peers_.give_notice(CommError::Kind::kPeerDied, culprit);
    }
    peers_.look_around([](int) { return false; }, [&] { return text(letter, ""); });
}

void Far::late(const Letter& letter) {
    const int culprit = inquest_->hold(letter.peer, [this] { return is_over(); });
    give_up(CommError::Kind::kLost, culprit, letter, "");
}

void Far::failed(const Letter& letter, const std::string& reason) {
    if (!peers_.notice()) learn(kTimeToLearn);
    give_up(CommError::Kind::kPeerDied, letter.peer, letter, reason);
}

void Far::give_up(CommError::Kind kind, int culprit, const Letter& letter, const std::string& reason) {
    peers_.give_notice(kind, culprit);  // unless there is one
    peers_.heed([&] { return text(letter, reason); });
    std::abort();  // there is a notice, so it has thrown
}

// Wait for the word that another rank may have sent before it went.
void Far::learn(std::chrono::milliseconds limit) {
    try {
        if (word_->wait(limit)) peers_.give_notice(static_cast<CommError::Kind>(heard_.kind), heard_.culprit);
    } catch (const std::exception&) {  // it has not come, and will not
    }
}

void Far::end() {
    {
        const std::lock_guard lock(mutex_);
        if (std::exchange(ended_, true)) return;
    }
    peers_.give_notice(CommError::Kind::kInterrupted, peers_.number(peers_.rank()));  // unless there is one
    tell();
    try {  // gloo lets go of all connections when time is up for one message
        std::byte nothing{};
        engine_->receive(strangers_.front(), kNobodysTag, &nothing, 1)->wait(1ms);
    } catch (const std::exception&) {
    }
}

// Twice: who listens wakes at once; but gloo asks the receiver back, and the listener of one that is in the middle of
// other remarks may be too late, so the word is also in what all have asked for from the beginning.
void Far::tell() {
    const auto notice = peers_.notice();
    inquest_->tell(*notice);
    const Word word{static_cast<std::int32_t>(notice->kind), notice->culprit};
    std::vector<Engine::Handle> letters;
    for (const int stranger : strangers_) {
        try {
            letters.push_back(
                engine_->send(stranger, kWordTag, reinterpret_cast<const std::byte*>(&word), sizeof(word)));
        } catch (const std::exception&) {  // it is gone
        }
    }
    const auto until = Clock::now() + kTimeToTell;
    for (const auto& letter : letters) {
        try {
            const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
            letter->wait(std::max(left, 1ms));
        } catch (const std::exception&) {
        }
    }
}

std::string Far::text(const Letter& letter, const std::string& reason) const {
    return (letter.outgoing ? "send(" : "recv(") + std::to_string(letter.bytes) + " bytes " +
           (letter.outgoing ? "to " : "from ") + peers_.title(letter.peer) + ") within " +
           std::to_string(letter.timeout.count()) + " ms" + (reason.empty() ? "" : " (" + reason.substr(0, 200) + ")");
}

}  // namespace dist_prims
