#include "work.h"

#include <algorithm>

#include "../../common/thread.h"
#include "../../common/trace.h"
#include "python_use.h"

namespace dist_prims {
namespace {

std::string message_of(const std::exception_ptr& error) {
    try {
        std::rethrow_exception(error);
    } catch (const std::exception& known) {
        return known.what();
    } catch (...) {
        return "an exception of an unknown type";
    }
}

c10::intrusive_ptr<c10::ivalue::Future> new_future(std::size_t lists) {
    const c10::TypePtr list = c10::ListType::create(c10::TensorType::get());
    return c10::make_intrusive<c10::ivalue::Future>(lists == 0 ? list : c10::ListType::create(list));
}

c10::IValue future_value(const std::vector<at::Tensor>& outputs, std::size_t lists) {
    if (lists == 0) return outputs;
    std::vector<std::vector<at::Tensor>> values(lists);
    for (std::size_t index = 0; index < outputs.size(); ++index)
        values[index / (outputs.size() / lists)].push_back(outputs[index]);
    return values;
}

}  // namespace

std::optional<c10::Stream> current_stream(const std::vector<at::Tensor>& tensors) {
    if (tensors.empty() || tensors[0].is_cpu()) return std::nullopt;
    const c10::Device device = tensors[0].device();
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

PrimsWork::PrimsWork(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs,
                     std::uint64_t sequence, std::size_t lists)
    : Work(rank, type, title, outputs),
      outputs_(std::move(outputs)),
      sequence_(sequence),
      lists_(lists),
      stream_(current_stream(outputs_)) {}

PrimsWork::Completion PrimsWork::completion() {
    return [self = droppable(c10::intrusive_ptr<PrimsWork>::reclaim_copy(this))](std::exception_ptr error) {
        return (*self)->complete(error);
    };
}

void PrimsWork::set_waiter(Waiter waiter) {
    const std::lock_guard lock(guard_);
    if (!done_) waiter_ = std::move(waiter);
}

std::function<void()> PrimsWork::complete(std::exception_ptr error) {
    finish(error);            // of c10d::Work: exception() returns the error from now on
    Waiter waiter;            // destroyed without the lock: it may hold this object
    bool has_future = false;  // if getFuture() is called later, it settles the future itself
    {
        const std::lock_guard lock(guard_);
        waiter.swap(waiter_);
        done_ = true;
        error_ = error;
        has_future = future_ != nullptr;
    }
    if (!has_future) return {};
    return [self = droppable(c10::intrusive_ptr<PrimsWork>::reclaim_copy(this))] { (*self)->run_callbacks(); };
}

void PrimsWork::run_callbacks() const {
    const PythonUse use;
    if (!use.wait_until_decided()) return;
    const c10::OptionalStreamGuard on_stream(stream_);
    if (const auto error = caught([&] { settle_future(*future_); }))
        TORCH_WARN("a callback on the end of ", c10d::opTypeToString(retrieveOpType()),
                   " has failed: ", message_of(error));
}

void PrimsWork::settle_future(c10::ivalue::Future& future) const {
    if (error_)
        future.setError(error_);
    else
        future.markCompleted(future_value(outputs_, lists_));
}

bool PrimsWork::wait(std::chrono::milliseconds timeout) {
    Waiter waiter;
    {
        const std::lock_guard lock(guard_);
        waiter = waiter_;
    }
    const TraceSpan span(TraceKind::kWait);
    if (waiter) waiter(timeout == kNoTimeout ? std::chrono::milliseconds::max() : timeout);
    if (const auto error = exception()) std::rethrow_exception(error);
    return true;
}

int PrimsWork::sourceRank() const {
    return source_ ? source_() : Work::sourceRank();
}

c10::intrusive_ptr<c10::ivalue::Future> PrimsWork::getFuture() {
    bool done = false;
    {
        const std::lock_guard lock(guard_);
        if (future_) return future_;
        future_ = new_future(lists_);
        done = done_;
    }
    if (done) settle_future(*future_);
    return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> DoneWork::getFuture() {
    auto future = new_future(lists_);
    future->markCompleted(future_value(outputs_, lists_));
    return future;
}

bool CoalescedWork::isCompleted() {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
}

bool CoalescedWork::isSuccess() const {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
}

std::exception_ptr CoalescedWork::exception() const {
    for (const auto& work : works_)
        if (const auto error = work->exception()) return error;
    return nullptr;
}

bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
    for (const auto& work : works_) work->wait(timeout);
    return true;
}

}  // namespace dist_prims
