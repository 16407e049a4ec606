// A backend that is made when it is first needed.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../../common/thread.h"

namespace dist_prims {

class LazyBackend {
public:
    using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

    explicit LazyBackend(std::function<BackendPtr()> make) : make_(std::move(make)) {}

    // Throws where a signal handler that has interrupted the making of the backend needs it.
    c10d::Backend* get(int rank) {
        const auto here = std::this_thread::get_id();
        TORCH_CHECK(making_thread_ != here, "rank ", rank,
                    ": a signal handler needs the group of gloo whose making it ",
                    "interrupts; set a flag in the handler, and make the call after the interrupted one has returned");
        const std::lock_guard lock(guard_);
        if (backend_) return backend_.get();
        making_thread_ = here;
        const auto failed = caught([this] { backend_ = make_(); });
        making_thread_ = std::thread::id();
        if (failed) std::rethrow_exception(failed);
        return backend_.get();
    }
    // The backend if it has been made; otherwise null.
    const BackendPtr& get_if_made() const { return backend_; }
    void leak() { static_cast<void>(backend_.release()); }

private:
    const std::function<BackendPtr()> make_;
    std::mutex guard_;
    std::atomic<std::thread::id> making_thread_{};
    BackendPtr backend_;
};

}  // namespace dist_prims
