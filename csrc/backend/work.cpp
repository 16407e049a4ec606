#include "work.h"

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace dist_prims {

PrimsWork::PrimsWork(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs,
                     std::uint64_t sequence, std::shared_ptr<Queue> queue)
    : Work(rank, type, title, outputs), outputs_(std::move(outputs)), sequence_(sequence), queue_(std::move(queue)) {}

Queue::Handle PrimsWork::job(std::function<void()> run) {
    auto self = c10::intrusive_ptr<PrimsWork>::reclaim_copy(this);
    job_ = std::make_shared<Queue::Job>();
    job_->run = std::move(run);
    job_->done = [self](std::exception_ptr error) { self->complete(error); };
    return job_;
}

void PrimsWork::complete(std::exception_ptr error) {
    finish(error);
    Queue::Handle job;
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
        const std::lock_guard lock(guard_);
        job.swap(job_);  // it holds us
        done_ = true;
        error_ = error;
        future = future_;
    }
    if (future) settle(*future);
}

void PrimsWork::settle(c10::ivalue::Future& future) const {
    if (error_)
        future.setError(error_);
    else
        future.markCompleted(c10::IValue(outputs_));
}

bool PrimsWork::wait(std::chrono::milliseconds timeout) {
    Queue::Handle job;
    {
        const std::lock_guard lock(guard_);
        if (!done_) job = job_;
    }
    if (job) {
        const auto limit = timeout == kNoTimeout ? std::chrono::milliseconds::max() : timeout;
        TORCH_CHECK(queue_->wait(job, limit, check_signals), "the collective was not done after ", timeout.count(),
                    " ms");
    }
    if (const auto error = exception()) std::rethrow_exception(error);
    return true;
}

c10::intrusive_ptr<c10::ivalue::Future> PrimsWork::getFuture() {
    bool done = false;
    {
        const std::lock_guard lock(guard_);
        if (future_) return future_;
        future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
        done = done_;
    }
    if (done) settle(*future_);
    return future_;
}

void check_signals() {
    if (::syscall(SYS_gettid) != ::getpid()) return;  // Python gives signals to its main thread only
    pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

}  // namespace dist_prims
