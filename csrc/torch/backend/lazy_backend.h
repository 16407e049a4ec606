// A backend that is made when it is first needed: the group of gloo for sparse tensors.
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

    // Makes the backend, or returns the one that has been made. Throws in a signal handler that has interrupted the
    // making on this thread. `rank` is for the error.
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
        made_ = backend_.get();
        return made_;
    }
    // Returns null if the backend has not been made. It does not wait while another thread makes the backend.
    c10d::Backend* get_if_made() const { return made_; }
    // Never destroys the backend: for a forked child, which must not end its parent's group.
    void leak() { static_cast<void>(backend_.release()); }

private:
    const std::function<BackendPtr()> make_;
    std::mutex guard_;
    std::atomic<std::thread::id> making_thread_{};  // the thread in make_()
    BackendPtr backend_;                            // under guard_
    std::atomic<c10d::Backend*> made_{nullptr};     // backend_, stored when it is whole, for threads without the guard
};

}  // namespace dist_prims
