// The thread of a transport (TCP or UCX). It moves the messages of the data lane while no other thread waits for one.
//
// A thread that waits for a message of a lane moves all messages of the lane. The transport's thread only looks, at
// intervals that double from kFirstLook to kLastLook, whether a thread has waited since the last look. If none has, or
// a thread that is about to wait for something else has asked for it by ask(), the transport's thread moves the
// messages. It stops when a later look finds that a thread has waited.
#pragma once

#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <functional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "../common/thread.h"
#include "socket.h"

namespace dist_prims {

class BackgroundMover {
public:
    BackgroundMover() : wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
        if (wake_.descriptor() < 0) throw std::system_error(errno, std::generic_category(), "eventfd()");
    }

    // Starts the thread. `body` sleeps until descriptor() or a descriptor of the lane is readable, and calls look()
    // after each sleep; it returns when is_stopping(). `what` names the thread in an error; see start_thread().
    void start(const std::string& what, std::function<void()> body) {
        thread_ = start_thread(what, [body = std::move(body)] {
            sigset_t all;
            ::sigfillset(&all);
            ::pthread_sigmask(SIG_BLOCK, &all, nullptr);  // signals are for the threads of the program
            body();
        });
    }
    // Any thread: ends the thread. A later call does nothing.
    void stop() {
        if (is_stopping_.exchange(true)) return;
        ::eventfd_write(wake_.descriptor(), 1);
        thread_.join();
    }
    bool is_stopping() const { return is_stopping_; }
    // Any thread: makes the transport's thread move the messages.
    void ask() {
        if (!is_asked_.exchange(true)) ::eventfd_write(wake_.descriptor(), 1);
    }
    int descriptor() const { return wake_.descriptor(); }

    // For the transport's thread: whether it moves the messages of the lane.
    bool moves() const { return moves_; }
    // For the transport's thread: how long it may sleep until its next look, while it does not move messages.
    std::chrono::milliseconds until_look() const { return until_look_; }
    // For the transport's thread: decides whether it moves messages from now on. `is_woken`: descriptor() is readable.
    template <typename Lane>
    void look(Lane& lane, bool is_woken) {
        constexpr std::chrono::milliseconds kFirstLook{2}, kLastLook{64};
        eventfd_t count = 0;
        if (is_woken) ::eventfd_read(wake_.descriptor(), &count);
        const bool is_asked = is_asked_.exchange(false);
        const bool is_idle = lane.is_idle_since(waits_) || is_asked;
        const bool is_same = std::exchange(moves_, is_idle) == is_idle;
        until_look_ = is_same ? std::min(2 * until_look_, kLastLook) : kFirstLook;
    }

private:
    const Socket wake_;  // an eventfd, which is written after a change of the next two
    std::atomic<bool> is_stopping_{false}, is_asked_{false};
    bool moves_ = true;
    std::chrono::milliseconds until_look_{2};
    std::uint64_t waits_ = 0;  // of the lane, at the last look
    std::thread thread_;
};

}  // namespace dist_prims
