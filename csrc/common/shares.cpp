#include "shares.h"

#include <pthread.h>

#include <atomic>
#include <exception>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "thread.h"

namespace dist_prims {
namespace {

// Memory order: the start of a helper orders all that the caller has written before. A thread adds to `ended` (release)
// after its share, and the caller reads `ended` (acquire).
struct Division {
    std::function<void(std::size_t)> work;   // not called any more when all shares have begun
    std::vector<std::exception_ptr> errors;  // by share
    std::atomic<std::size_t> begun{0}, ended{0};

    void do_shares() {
        for (std::size_t share = 0; (share = begun.fetch_add(1, std::memory_order_relaxed)) < errors.size();) {
            errors[share] = caught([&] { work(share); });
            ended.fetch_add(1, std::memory_order_release);
        }
    }
};

}  // namespace

void do_shares(std::size_t threads, std::size_t shares, const std::function<void(std::size_t)>& work) {
    const auto division = std::make_shared<Division>();
    division->work = work;
    division->errors.resize(shares);
    caught([&] {
        for (std::size_t helper = 1; helper < threads; ++helper) {
            std::thread thread = start_thread("a helper of a reduction", [division] { division->do_shares(); });
            ::pthread_setname_np(thread.native_handle(), "dist_prims_fold");
            thread.detach();
        }
    });
    division->do_shares();
    while (division->ended.load(std::memory_order_acquire) < shares) std::this_thread::yield();
    // Takes the error out of the division, which a helper may release last. The references to an error are counted in
    // the C++ runtime, where ThreadSanitizer does not see it: it would report that the helper frees what the caller
    // reads.
    for (std::exception_ptr& error : division->errors) {
        if (error) std::rethrow_exception(std::exchange(error, nullptr));
    }
}

}  // namespace dist_prims
