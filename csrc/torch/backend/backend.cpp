#include "backend.h"

#include <ATen/record_function.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>

#include "../../common/thread.h"
#include "../../shm/collectives.h"
#include "../common/python_signals.h"
#include "../common/python_use.h"
#include "../common/work.h"

namespace dist_prims {
namespace {

constexpr WaitGraph::Wait kInCollective{WaitGraph::WaitKind::kCollective};

// Called at intervals by a thread that waits for a collective in the queue: handles Ctrl-C, and shows the other ranks
// in the wait-for graph that this rank waits. A background thread shows nothing: the program of this rank continues.
void check_while_waiting(LongWait& waiting) {
    if (!in_background) waiting.published.set(kInCollective);
    run_python_signal_handlers();
}

// Waits for a job of the queue, whose thread looks for failures meanwhile. After `limit` it ends the group and throws,
// so that no tensor is written after the wait.
void wait_for_job(Queue& queue, const Queue::Handle& job, HostSegment& host_segment, Execution& execution,
                  Milliseconds limit) {
    Membership& membership = host_segment.membership;
    LongWait waiting(membership.wait_graph());
    const auto interrupt = [&] { check_while_waiting(waiting); };
    if (queue.wait(job, limit, interrupt)) return;
    try {
        while (!membership.is_final(waiting.diagnosis, {kInCollective}, limit)) {
            if (queue.wait(job, kBetweenDiagnoses, interrupt)) return;
        }
        membership.throw_timeout(std::to_string(limit.count()) + " ms in the wait for " + job->title +
                                     "; the group has ended, so that nothing is written late",
                                 waiting.diagnosis.verdict());
    } catch (const CommError&) {
        execution.wake();
        queue.wait(job, Milliseconds::max(), {});  // the job ends at its next check for failures
        throw;
    }
}

FlightRecorder::Entry flight_record_entry(const Call& call, const CallOptions& options, std::uint64_t sequence) {
    FlightRecorder::Entry entry{.sequence = sequence, .count = call.count, .title = options.title};
    entry.dtype = call.collective == Collective::kBarrier ? "" : name_of(call.dtype);
    entry.timeout_ms = options.timeout.count();
    return entry;
}

}  // namespace

PrimsBackend::PrimsBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Setup setup,
                           const std::function<int()>& ended)
    : Backend(rank, size),
      options_(c10::make_intrusive<Options>("dist_prims", setup.timeout)),
      setup_(std::make_unique<const Setup>(std::move(setup))),
      gloo_(std::make_unique<LazyBackend>(setup_->make_gloo)),
      queue_(std::make_shared<Queue>("rank " + std::to_string(rank))) {
    init();  // of c10d::Backend
    options_->global_ranks_in_group = setup_->ranks;
    options_->group_name = setup_->group;
    const CreationFailure creation_failure(store, rank);
    try {
        Hosts hosts = hosts_of(setup_->hosts, rank);
        host_segment_ = make_host_segment(store, rank, *setup_, hosts, creation_failure, ended);
        execution_ = make_execution(host_segment_, rank, *setup_, std::move(hosts));
        // The first agreement: all ranks have come, with the same sizes.
        Call first;
        first.count = host_segment_->slots.capacity();
        first.layout = setup_->one_shot_bytes;
        first.set_algorithm(c10::str("one shot to ", first.layout, ", slot ", first.count));
        const LinkCosts link = execution_->first_agreement(first, setup_->network, setup_->timeout);
        trace_group_ = std::make_unique<const TraceGroup>(setup_->describe(link));
        delete_rendezvous_key(*store, rank, hosts_of(setup_->hosts, rank));
    } catch (...) {
        if (execution_) execution_->forward_notice();
        creation_failure.report(std::current_exception());
    }
    host_segment_->membership.on_wait(run_python_signal_handlers);
    // A program may end without destroying its groups.
    leave_at_exit_.emplace([this] { leave(); });
}

PrimsBackend::~PrimsBackend() {
    if (owner_process_ == this_process()) {
        shutdown();
        return;
    }
    // A forked child has no thread to join, and must not write to the memory of its parent: it leaks these.
    static_cast<void>(new std::shared_ptr<HostSegment>(std::move(host_segment_)));
    static_cast<void>(new std::shared_ptr<Execution>(std::move(execution_)));
    static_cast<void>(new std::shared_ptr<Queue>(std::move(queue_)));
    static_cast<void>(setup_.release());
    gloo_->leak();
}

void PrimsBackend::setTimeout(Milliseconds timeout) {
    options_->timeout = timeout;
    for (c10d::Backend* const backend : {gloo_->get_if_made(), setup_->nccl.get()}) {
        if (backend) backend->setTimeout(timeout);
    }
}

void PrimsBackend::number_from(std::uint64_t first) {
    sequence_ = messages_ = incrementals_ = first;
    WaitGraphs::of_this_process()->number_from(first);
}

void PrimsBackend::shutdown() {
    if (owner_process_ != this_process()) return;  // a forked child has nothing to end
    // 1. Release the GIL, if this thread has it: a job that the queue waits for may need it.
    const bool has_gil = Py_IsInitialized() && PyGILState_Check();
    std::optional<pybind11::gil_scoped_release> release;
    if (has_gil) release.emplace();
    const auto reason = std::make_exception_ptr(CommError(
        CommError::Kind::kPeerLeft,
        "rank " + std::to_string(rank_) + ": the group was destroyed or aborted on this rank before this was done"));
    // 2. End the collectives: the running one has a moment to finish, then it is stopped.
    host_segment_->membership.leave();
    const bool is_over = queue_->close(reason, [this] {
        host_segment_->membership.stop();
        execution_->wake();
    });
    // Inside of a signal handler: the interrupted call ends too late to send the notice to other hosts.
    if (!is_over) execution_->end_on_all_hosts();
    // 3. End the messages, and the waits outside of the queue.
    host_segment_->p2p.close(reason);
    host_segment_->membership.stop();
    execution_->close_messages(reason);
    execution_->leave();
}

void PrimsBackend::leave() {
    host_segment_->membership.leave();
    execution_->leave();
}

// Jobs and messages call members of this object, so they keep its memory by a weak reference. It does not keep the
// group: when the user drops the last reference, torch calls release_resources(), which ends the group.
c10::weak_intrusive_ptr<PrimsBackend> PrimsBackend::weak_reference() {
    return c10::weak_intrusive_ptr<PrimsBackend>(c10::intrusive_ptr<PrimsBackend>::reclaim_copy(this));
}

c10d::Backend* PrimsBackend::other_backend(const Tensors& tensors) {
    for (const auto& tensor : tensors)
        TORCH_CHECK_VALUE(tensor.device() == tensors[0].device(), "rank ", rank_, ": the tensors of one call are on ",
                          tensors[0].device(), " and on ", tensor.device(), "; move them to one device");
    if (!setup_->nccl || tensors.empty() || !tensors[0].is_cuda()) return nullptr;
    check_owner();
    return setup_->nccl.get();
}

PrimsBackend::TakenQueue PrimsBackend::take_idle_queue(const char* title, bool wanted) {
    return {queue_->take(title, wanted) ? queue_.get() : nullptr, [](Queue* queue) { queue->give_back(); }};
}

WorkPtr PrimsBackend::run_or_enqueue(std::vector<CollectiveCall> calls, const CallOptions& options, Tensors outputs) {
    // 1. Number the calls, and add them to the flight recorder: coalesced calls as one record.
    const auto taken_queue = take_idle_queue(options.title, !options.async);
    for (CollectiveCall& call : calls) call.announced.sequence = ++sequence_;
    const Call& first = calls.front().announced;
    const std::uint64_t sequence = first.sequence;
    const std::uint64_t entry =
        flight_recorder_.add(flight_record_entry(first, options, sequence), taken_queue != nullptr);
    // 2. A synchronous call on an idle queue runs on this thread.
    if (taken_queue) {
        std::optional<at::RecordFunction> range;  // even an unused one costs more than this test
        if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) [[unlikely]] {
            range.emplace(std::move(*callbacks));
            const std::vector<c10::IValue> inputs(outputs.begin(), outputs.end());
            at::detail::record_function_with_scope(*range, options.title, inputs);
        }
        run_calls(calls, options.timeout, entry);
        return c10::make_intrusive<DoneWork>(rank_, options.type, std::move(outputs), sequence, options.output_lists);
    }
    // 3. Any other call becomes a job of the queue, which another thread may run.
    auto work = c10::make_intrusive<PrimsWork>(rank_, options.type, options.title, std::move(outputs), sequence,
                                               options.output_lists);
    const auto job = std::make_shared<Queue::Job>();
    job->title = options.title;
    job->done = work->completion();
    job->run = [this, self = weak_reference(), calls = droppable(std::move(calls)), timeout = options.timeout, entry,
                caller = CallerStream(work->result()), called = tracing() ? trace_now() : 0] {
        trace_queued(*trace_group_, calls->front().announced, called);
        caller.run([&] { run_calls(*calls, timeout, entry); });
    };
    // 4. Wait for the job here, or in Work::wait(), which must not need this object: the user may drop the group first.
    if (options.async) {
        queue_->submit(job);
        work->set_waiter([queue = queue_, host_segment = host_segment_, execution = execution_,
                          job](Milliseconds limit) { wait_for_job(*queue, job, *host_segment, *execution, limit); });
    } else {
        LongWait waiting(host_segment_->membership.wait_graph());
        queue_->run(job, [&] { check_while_waiting(waiting); });
        if (work->exception()) std::rethrow_exception(work->exception());
    }
    return coalesced(work);
}

void PrimsBackend::run_calls(const std::vector<CollectiveCall>& calls, Milliseconds timeout, std::uint64_t entry) {
    const at::NoGradGuard no_grad;
    flight_recorder_.start(entry);
    with_flight_record(entry, [&] {
        for (const CollectiveCall& call : calls) {
            const TraceCall traced(*trace_group_, call.announced);
            execution_->run(call, timeout);
        }
    });
}

template <typename Work>
void PrimsBackend::with_flight_record(std::uint64_t entry, const Work& work) {
    try {
        work();
    } catch (...) {
        flight_recorder_.end(entry, false);
        write_record();
        execution_->forward_notice();
        run_abort_hooks();
        throw;
    }
    flight_recorder_.end(entry, true);
}

void PrimsBackend::write_record() const {
    if (!setup_->dump.empty()) write_flight_record(setup_->dump, rank_, record());
}

PrimsBackend::BackendPtr PrimsBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                             const std::vector<int>& ranks, const c10::intrusive_ptr<Options>& opts) {
    check_owner();
    for (const int rank : ranks) {
        TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "split_group: rank ", rank, " is not in a group of ", size_,
                          " ranks; the ranks of a split are those in the group that is split");
        TORCH_CHECK_VALUE(std::count(ranks.begin(), ranks.end(), rank) == 1, "split_group: rank ", rank,
                          " is listed twice; list each rank once");
    }
    const auto own = std::find(ranks.begin(), ranks.end(), rank_);
    if (own == ranks.end()) return nullptr;
    return setup_->make_child({.store = store,
                               .name = opts->group_name,
                               .rank = static_cast<int>(own - ranks.begin()),
                               .size = static_cast<int>(ranks.size()),
                               .timeout = opts->timeout,
                               .ranks = ranks});
}

PrimsBackend::BackendPtr PrimsBackend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                             const c10::intrusive_ptr<Options>& opts, const int& rank,
                                             const int& size) {
    check_owner();
    TORCH_CHECK_VALUE(rank >= 0 && rank < size, "merge_remote_group: this is call number ", rank + 1,
                      " with this store, for a group of ", size,
                      " ranks; pass the number of all ranks as size, and a store or a PrefixStore for this group only");
    return setup_->make_child(
        {.store = store, .name = opts->group_name, .rank = rank, .size = size, .timeout = opts->timeout, .ranks = {}});
}

PrimsBackend::BackendPtr PrimsBackend::shrink(const std::vector<int64_t>& ranks_to_exclude, int /*flags*/,
                                              const c10::intrusive_ptr<Options>& opts) {
    check_owner();
    TORCH_CHECK_VALUE(!opts, "rank ", rank_, ": shrink_group: a shrunk group of this backend has the options of the ",
                      "group before; leave pg_options out");
    return setup_->make_shrunk(*this, {ranks_to_exclude.begin(), ranks_to_exclude.end()});
}

c10d::ErrorType PrimsBackend::getError() {
    const auto notice = host_segment_->membership.notice();
    if (!notice) return c10d::ErrorType::SUCCESS;
    return notice->kind == CommError::Kind::kTimeout ? c10d::ErrorType::TIMEOUT : c10d::ErrorType::REMOTE_ERROR;
}

#ifdef C10D_BACKEND_HAS_HOOKS
void PrimsBackend::registerAbortHook(int64_t hook_id, c10d::AbortHook hook) {
    const auto shared_hook = std::make_shared<const c10d::AbortHook>(std::move(hook));
    const std::lock_guard lock(hooks_guard_);
    TORCH_CHECK_VALUE(abort_hooks_.try_emplace(hook_id, shared_hook).second, "rank ", rank_, ": abort hook ", hook_id,
                      " is registered already; choose another number, or unregister that hook first");
}

void PrimsBackend::unregisterAbortHook(int64_t hook_id) {
    decltype(abort_hooks_)::node_type removed;  // destroyed without the lock: a hook of Python's waits for the GIL
    const std::lock_guard lock(hooks_guard_);
    removed = abort_hooks_.extract(hook_id);
    TORCH_CHECK_VALUE(removed, "rank ", rank_, ": there is no abort hook ", hook_id);
}
#endif

// Calls the hooks of the user if the group has ended by a failure. A mismatch does not end the group.
void PrimsBackend::run_abort_hooks() const {
    if (!host_segment_->membership.notice()) return;
    const PythonUse use;
    if (!use.wait_until_decided()) return;
    decltype(abort_hooks_) hooks;
    {
        const std::lock_guard lock(hooks_guard_);
        hooks = abort_hooks_;
    }
    for (const auto& [number, hook] : hooks) {
        if (caught(*hook)) TORCH_WARN("rank ", rank_, ": abort hook ", number, " has failed");
    }
}

void PrimsBackend::all_reduce_now(const at::Tensor& tensor, const c10d::ReduceOp& op) {
    // 1. Is this a plain tensor, on the short path of one host?
    check_owner();
    TORCH_CHECK_VALUE(has_memory(tensor), "all_reduce on rank ", rank_, kNoMemory);
    const bool is_plain = tensor.is_cpu() && tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg() &&
                          tensor.is_contiguous() && op.op_ != c10d::ReduceOp::PREMUL_SUM &&
                          !execution_->spans_hosts() && !execution_->has_pins(Collective::kAllReduce);
    const CallOptions options = call_options(Collective::kAllReduce, false);
    // 2. If it is not plain, or the queue is busy, take the way of all other calls.
    const auto taken_queue = take_idle_queue(options.title, is_plain);
    if (!taken_queue) {
        c10d::AllreduceOptions opts;
        opts.reduceOp = op;
        opts.asyncOp = false;
        Tensors tensors{tensor};
        allreduce(tensors, opts)->wait();
        return;
    }
    // 3. Describe the call, compare it with the calls of the other ranks, and reduce.
    const auto record = profiler_record("allreduce", false, tensor, tensor);
    const auto count = static_cast<std::size_t>(tensor.numel());
    Call call = announced_call(Collective::kAllReduce, tensor, count);
    call.op = checked_op("all_reduce", op, tensor);
    call.sequence = ++sequence_;
    call.tensor_ref = host_segment_->tensor_ref_of(bytes_of(tensor), count * size_of(call.dtype));
    with_flight_record(flight_recorder_.add(flight_record_entry(call, options, call.sequence), true), [&] {
        const TraceCall traced(*trace_group_, call);
        host_segment_->slots.open(call, options.timeout);
        all_reduce(*host_segment_, call.dtype, call.op, bytes_of(tensor), bytes_of(tensor), count, call.tensor_ref);
    });
}

at::Tensor PrimsBackend::allocateTensor(long size, at::TensorOptions options) {
    return shared_tensor({size}, options.dtype().toScalarType());
}

WorkPtr PrimsBackend::start_message(const CallOptions& options, const Tensors& tensors, int peer,
                                    PointToPoint::Tag tag) {
    // 1. Number the message, and add it to the flight recorder.
    const at::Tensor& tensor = tensors[0];
    const bool outgoing = options.type == c10d::OpType::SEND;
    FlightRecorder::Entry entry{
        .sequence = ++messages_, .count = static_cast<std::uint64_t>(tensor.numel()), .title = options.title};
    entry.dtype = name_of(type_of(tensor));
    entry.timeout_ms = options.timeout.count();
    entry.point_to_point = true;
    const std::uint64_t record = flight_recorder_.add(entry, true);
    // 2. What the thread that completes the message does: it delivers the data, and completes the Work.
    auto work = c10::make_intrusive<PrimsWork>(rank_, options.type, options.title, tensors, messages_);
    const auto data = droppable(MessageData(tensor, outgoing));
    auto done = [this, self = weak_reference(), data, outgoing, record, caller = CallerStream(tensors),
                 finish = work->completion()](std::exception_ptr error) {
        if (!outgoing && !error) error = caught([&] { caller.run([&] { data->deliver(); }); });
        caught([&] {
            flight_recorder_.end(record, !error);
            if (error) write_record();
        });
        auto callback = finish(error);
        if (!error) return callback;
        return std::function<void()>([this, self, callback = std::move(callback)] {  // called without the locks of p2p
            execution_->forward_notice();
            run_abort_hooks();
            if (callback) callback();
        });
    };
    // 3. Start the message. `MessageData` owns the memory as long as a transport needs it.
    const TraceCall traced(*trace_group_, messages_);
    StartedMessage message = execution_->start_message({outgoing,
                                                        peer,
                                                        tag,
                                                        {data->data(), static_cast<std::size_t>(tensor.nbytes()), data},
                                                        options.timeout,
                                                        std::move(done)});
    work->set_source(std::move(message.source));
    work->set_waiter(std::move(message.wait));
    return work;
}

c10d::Backend* PrimsBackend::other_backend_for_message(const Tensors& tensors, int tag) {
    auto* const backend = other_backend(tensors);
    if (!backend) execution_->check_tag(tag);
    return backend;
}

}  // namespace dist_prims
