// What a call returns: something to wait for.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "../core/queue.h"

namespace dist_prims {

class PrimsWork : public c10d::Work {
public:
    PrimsWork(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs, std::uint64_t sequence,
              std::shared_ptr<Queue> queue);

    // The work as a job of its queue; `run` is what it does.
    Queue::Handle job(std::function<void()> run);

    bool wait(std::chrono::milliseconds timeout) override;
    void synchronize() override { wait(kNoTimeout); }
    std::vector<at::Tensor> result() override { return outputs_; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
    uint64_t getSequencenumber() const override { return sequence_; }

private:
    void complete(std::exception_ptr error);
    void settle(c10::ivalue::Future& future) const;

    const std::vector<at::Tensor> outputs_;
    const std::uint64_t sequence_;
    const std::shared_ptr<Queue> queue_;
    Queue::Handle job_;
    std::mutex guard_;  // of the future, which is only made when someone asks
    c10::intrusive_ptr<c10::ivalue::Future> future_;
    bool done_ = false;
    std::exception_ptr error_;
};

// Throws what Python has for us, such as KeyboardInterrupt; to be called now and then by who waits.
void check_signals();

}  // namespace dist_prims
