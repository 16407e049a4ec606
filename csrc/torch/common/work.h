// The Work that a call returns.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace dist_prims {

class PrimsWork : public c10d::Work {
public:
    // Returns when the work is done, with or without an error; after the limit it ends the group and throws.
    using Waiter = std::function<void(std::chrono::milliseconds limit)>;

    PrimsWork(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs, std::uint64_t sequence);

    // The function to call when the work is done, with its result; it returns a callback.
    std::function<std::function<void()>(std::exception_ptr)> completion();

    void set_waiter(Waiter waiter);
    void set_source(std::function<int()> source) { source_ = std::move(source); }

    bool wait(std::chrono::milliseconds timeout) override;
    void synchronize() override { wait(kNoTimeout); }
    std::vector<at::Tensor> result() override { return outputs_; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
    uint64_t getSequencenumber() const override { return sequence_; }
    int sourceRank() const override;

private:
    std::function<void()> complete(std::exception_ptr error);
    void settle_future(c10::ivalue::Future& future) const;

    const std::vector<at::Tensor> outputs_;
    const std::uint64_t sequence_;
    std::function<int()> source_;  // returns the sender of a message
    std::mutex guard_;             // of all below
    Waiter waiter_;
    c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when it is first asked for
    bool done_ = false;
    std::exception_ptr error_;
};

// The Work of a call that is already done.
class DoneWork : public c10d::Work {
public:
    DoneWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, std::uint64_t sequence)
        : Work(rank, type), outputs_(std::move(outputs)), sequence_(sequence) {}

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
};

// Runs a part of a call on another thread in the caller's inference mode: tensors made in inference mode can only be
// written in it.
class CallerInferenceMode {
public:
    template <typename Act>
    void run(const Act& act) const {
        std::optional<c10::InferenceMode> inference;
        if (in_inference_) inference.emplace();
        const at::NoGradGuard no_grad;
        act();
    }

private:
    bool in_inference_ = c10::InferenceMode::is_enabled();
};

// Runs pending Python signal handlers and throws what they raise, such as KeyboardInterrupt. Called at intervals by
// waits.
void run_python_signal_handlers();

}  // namespace dist_prims
