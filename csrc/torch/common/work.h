// The Work that a call returns to torch: PrimsWork while the call may still run, DoneWork for a call that is done,
// CoalescedWork for several calls.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace dist_prims {

// A collective in the queue, or a message. The thread that completes it calls the function that completion() has
// returned; any thread may wait.
class PrimsWork : public c10d::Work {
public:
    // Waits for the work; wait() calls it. It returns when the work is done, with or without an error. After `limit`
    // it ends the group, and throws.
    using Waiter = std::function<void(std::chrono::milliseconds limit)>;
    // Completes the work, with its error or null. Returns a callback, possibly empty, that completes the future of the
    // work. The callback runs code of the user, so it must be called without a lock.
    using Completion = std::function<std::function<void()>(std::exception_ptr)>;

    // `title` names the call in profiles. `sequence` is the number of the call in its group. The value of the
    // future is the outputs as one list, or cut into `lists` lists of equal length unless `lists` is 0.
    PrimsWork(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs, std::uint64_t sequence,
              std::size_t lists = 0);

    // The function to call once when the work is done. It keeps this object.
    Completion completion();
    // Without a waiter, wait() does not wait: the work must be done before it is returned to the user.
    void set_waiter(Waiter waiter);
    // `source` returns the rank from which a message has come.
    void set_source(std::function<int()> source) { source_ = std::move(source); }

    bool wait(std::chrono::milliseconds timeout) override;
    void synchronize() override { wait(kNoTimeout); }
    std::vector<at::Tensor> result() override { return outputs_; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
    uint64_t getSequencenumber() const override { return sequence_; }
    int sourceRank() const override;

private:
    std::function<void()> complete(std::exception_ptr error);
    void run_callbacks() const;
    void settle_future(c10::ivalue::Future& future) const;

    const std::vector<at::Tensor> outputs_;
    const std::uint64_t sequence_;
    const std::size_t lists_;
    const std::optional<c10::Stream> stream_;  // of the caller; the callbacks of the future run on it
    std::function<int()> source_;
    std::mutex guard_;                                // of all below
    Waiter waiter_;                                   // empty after the completion
    c10::intrusive_ptr<c10::ivalue::Future> future_;  // made by the first getFuture(); null before
    bool done_ = false;
    std::exception_ptr error_;
};

// The Work of a call that is already done.
class DoneWork : public c10d::Work {
public:
    DoneWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::uint64_t sequence,
             std::size_t lists = 0)
        : Work(rank, type), outputs_(std::move(outputs)), sequence_(sequence), lists_(lists) {}

    bool isCompleted() override { return true; }
    bool isSuccess() const override { return true; }
    std::exception_ptr exception() const override { return nullptr; }
    bool wait(std::chrono::milliseconds) override { return true; }
    void synchronize() override {}
    std::vector<at::Tensor> result() override { return outputs_; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
    uint64_t getSequencenumber() const override { return sequence_; }

private:
    const std::vector<at::Tensor> outputs_;
    const std::uint64_t sequence_;
    const std::size_t lists_;
};

// The Work of several calls.
class CoalescedWork : public c10d::Work {
public:
    explicit CoalescedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works) : works_(std::move(works)) {}

    bool isCompleted() override;
    bool isSuccess() const override;
    std::exception_ptr exception() const override;
    // Waits for each of the works as long as `timeout`.
    bool wait(std::chrono::milliseconds timeout) override;
    void synchronize() override { wait(kNoTimeout); }

private:
    const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

// The current stream of this thread for the device of the tensors, which is the device of the first one. None for the
// CPU.
std::optional<c10::Stream> current_stream(const std::vector<at::Tensor>& tensors);

// The stream of the thread that makes this object, for the part of its call that another thread runs: a result for
// another device is copied to it in the order of the caller's stream.
class CallerStream {
public:
    explicit CallerStream(const std::vector<at::Tensor>& outputs) : stream_(current_stream(outputs)) {}
    // Runs `act` on this stream, without gradients.
    template <typename Act>
    void run(const Act& act) const {
        const at::NoGradGuard no_grad;
        const c10::OptionalStreamGuard on_stream(stream_);
        act();
    }

private:
    std::optional<c10::Stream> stream_;
};

}  // namespace dist_prims
