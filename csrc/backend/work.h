// What a call returns: something to wait for.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace dist_prims {

class PrimsWork : public c10d::Work {
public:
    // Returns when the work is done, however; after the limit it ends the group and throws.
    using Waiter = std::function<void(std::chrono::milliseconds limit)>;

    PrimsWork(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs, std::uint64_t sequence);

    // To be called when the work is done, with how it ended; returns whom to tell.
    std::function<std::function<void()>(std::exception_ptr)> finisher();

    void waits_by(Waiter waiter);
    void comes_from(std::shared_ptr<const int> source) { source_ = std::move(source); }

    bool wait(std::chrono::milliseconds timeout) override;
    void synchronize() override { wait(kNoTimeout); }
    std::vector<at::Tensor> result() override { return outputs_; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
    uint64_t getSequencenumber() const override { return sequence_; }
    int sourceRank() const override;

private:
    std::function<void()> complete(std::exception_ptr error);
    void settle(c10::ivalue::Future& future) const;

    const std::vector<at::Tensor> outputs_;
    const std::uint64_t sequence_;
    std::shared_ptr<const int> source_;  // of a message
    std::mutex guard_;                   // of all below
    Waiter waiter_;
    c10::intrusive_ptr<c10::ivalue::Future> future_;  // only made when someone asks
    bool done_ = false;
    std::exception_ptr error_;
};

// What a call returns that has done its work already.
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

// Throws what Python has for us, such as KeyboardInterrupt; to be called now and then by who waits.
void check_signals();

}  // namespace dist_prims
