// The threads that wait for messages of a lane, and an eventfd that ends their sleep. A lane over TCP and a lane over
// UCX have one each, which their lock guards.
//
// All threads of a lane sleep in epoll, or poll, on the same descriptors. When a thread has moved the message of
// another thread, it makes the eventfd readable. The threads then look at their own messages, and go on or sleep again.
#pragma once

#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <system_error>
#include <utility>
#include <vector>

#include "socket.h"

namespace dist_prims {

template <typename Message>
class WaitingThreads {
public:
    // Marks a message as awaited by this thread.
    class Scope {
    public:
        Scope(WaitingThreads& threads, Message& message) : threads_(threads), message_(message) {
            message.is_awaited = true;
            threads.awaited_.push_back(&message);
            ++threads.waits_;
        }
        ~Scope() {
            message_.is_aborted = message_.is_awaited = false;
            std::erase(threads_.awaited_, &message_);
            threads_.wake_others();
        }
        Scope(const Scope&) = delete;

    private:
        WaitingThreads& threads_;
        Message& message_;
    };

    // `waits`: the number of waits so far; tests begin near the end of the counter.
    explicit WaitingThreads(std::uint64_t waits = 0) : wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)), waits_(waits) {
        if (wake_.descriptor() < 0) throw std::system_error(errno, std::generic_category(), "eventfd()");
    }

    // Readable while the wait of some thread is over.
    int descriptor() const { return wake_.descriptor(); }
    // Wakes the threads whose waits are over, but for the calling thread, which waits for `own`.
    void wake_others(const Message* own = nullptr) {
        const bool wake = std::any_of(awaited_.begin(), awaited_.end(), [&](const Message* message) {
            return message != own && (message->is_done || message->is_aborted || !message->error.empty());
        });
        eventfd_t count = 0;
        if (std::exchange(is_wake_set_, wake) == wake) return;
        if (wake)
            ::eventfd_write(wake_.descriptor(), 1);
        else
            ::eventfd_read(wake_.descriptor(), &count);
    }
    // Whether no thread waits, and none has waited since the last call. `waits`: the number of waits at the last call,
    // which the caller keeps.
    bool is_none_since(std::uint64_t& waits) const {
        return std::exchange(waits, waits_) == waits_ && awaited_.empty();
    }

private:
    const Socket wake_;
    std::vector<Message*> awaited_;  // one for each waiting thread
    bool is_wake_set_ = false;       // the eventfd is readable
    std::uint64_t waits_;
};

}  // namespace dist_prims
