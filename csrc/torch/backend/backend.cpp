#include "backend.h"

#include <ATen/record_function.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <fstream>
#include <optional>

#include "../../common/thread.h"
#include "../../shm/collectives.h"
#include "work.h"

namespace dist_prims {
namespace {

constexpr Milliseconds kBetweenLooks{10};  // while a diagnosis is not final
constexpr WaitGraph::Wait kInCollective{WaitGraph::WaitKind::kCollective};

// Called at intervals by a thread that waits for a collective on the queue. A background thread publishes nothing: the
// program of this rank continues.
void look_at_queue(LongWait& waiting) {
    if (!in_background) waiting.published.set(kInCollective);
    check_signals();
}

// What the profiler shows of a call.
std::vector<c10::IValue> inputs_of(const Tensors& tensors) {
    return {tensors.begin(), tensors.end()};
}

}  // namespace

PrimsBackend::PrimsBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Setup setup,
                           const std::function<int()>& ended)
    : Backend(rank, size),
      setup_(std::move(setup)),
      options_(c10::make_intrusive<Options>("dist_prims", setup_.timeout)),
      owner_(this_process()),
      queue_(std::make_shared<Queue>("rank " + std::to_string(rank))) {
    init();
    const GroupCreation creation(store, rank);
    try {
        Hosts hosts = hosts_of(setup_.hosts, rank);
        host_segment_ = make_host_segment(store, rank, setup_, hosts, creation, ended);
        execution_ = make_execution(host_segment_, rank, setup_, std::move(hosts));
        Call first;  // the ranks must agree on this as on everything
        first.count = host_segment_->slots.capacity();
        first.layout = setup_.one_shot_bytes;
        first.by(c10::str("one shot to ", first.layout, ", slot ", first.count));
        execution_->agree(first, setup_.timeout);
    } catch (...) {
        if (execution_) execution_->forward_notice();
        stop_engine();
        creation.fail(std::current_exception());
    }
    host_segment_->membership.on_wait(check_signals);
}

PrimsBackend::~PrimsBackend() {
    if (owner_ == this_process()) {
        shutdown();
        return;
    }
    // A forked child has no thread to join and no mapping to write to, so these are leaked.
    static_cast<void>(new std::shared_ptr<HostSegment>(std::move(host_segment_)));
    static_cast<void>(new std::shared_ptr<Execution>(std::move(execution_)));
    static_cast<void>(new std::shared_ptr<Queue>(std::move(queue_)));
    static_cast<void>(new Setup(setup_));
    static_cast<void>(gloo_.release());
}

void PrimsBackend::setTimeout(Milliseconds timeout) {
    options_->timeout = timeout;
    for (const auto& each : {setup_.engine, gloo_, setup_.accelerator}) {
        if (each) each->setTimeout(timeout);
    }
}

void PrimsBackend::shutdown() {
    if (owner_ != this_process()) return;  // a forked child has nothing to end
    const bool held = Py_IsInitialized() && PyGILState_Check();
    std::optional<pybind11::gil_scoped_release> release;
    if (held) release.emplace();  // work that is waited for may need it
    const auto reason = std::make_exception_ptr(CommError(
        CommError::Kind::kPeerLeft,
        "rank " + std::to_string(rank_) + ": the group was destroyed or aborted on this rank before this was done"));
    host_segment_->membership.leave();
    const bool is_over = queue_->close(reason, [this] {
        host_segment_->membership.stop();
        execution_->wake();
    });
    // Called by a signal handler: the interrupted call ends too late to send the notice to other hosts.
    if (!is_over) execution_->forward_leave();
    host_segment_->p2p.close(reason);
    host_segment_->membership.stop();  // for waits outside of the queue
    stop_engine();
}

// Jobs and messages call members, so they keep the object, but not the group: when the last reference of a user goes,
// release_resources() ends it.
c10::weak_intrusive_ptr<PrimsBackend> PrimsBackend::kept() {
    return c10::weak_intrusive_ptr<PrimsBackend>(c10::intrusive_ptr<PrimsBackend>::reclaim_copy(this));
}

// Ends the engine. MPI writes to the memory of a message until it is shut down; gloo needs no call.
void PrimsBackend::stop_engine() {
    if (setup_.engine && setup_.engine->getBackendName() == "mpi") setup_.engine->shutdown();
}

void PrimsBackend::check_owner() const {
    TORCH_CHECK(owner_ == this_process(), "rank ", rank_,
                ": this process was forked from a rank and is none itself; use the "
                "group in process ",
                owner_, ", or start ranks with dist_prims.spawn");
}

c10d::Backend* PrimsBackend::gloo() {
    const auto here = std::this_thread::get_id();
    TORCH_CHECK(gloo_maker_ != here, "rank ", rank_, ": a signal handler needs the group of gloo whose making it ",
                "interrupts; set a flag in the handler, and make the call after the interrupted one has returned");
    const std::lock_guard lock(guard_);
    if (gloo_) return gloo_.get();
    gloo_maker_ = here;
    const auto failed = caught([this] { gloo_ = setup_.make_gloo(); });
    gloo_maker_ = std::thread::id();
    if (failed) std::rethrow_exception(failed);
    return gloo_.get();
}

c10d::Backend* PrimsBackend::other(const Tensors& tensors) {
    for (const auto& tensor : tensors) {
        if (tensor.is_cpu()) continue;
        TORCH_CHECK(setup_.accelerator, "rank ", rank_, ": a tensor is on ", tensor.device(),
                    ", and this torch has no NCCL for it; move it to the CPU first");
        return setup_.accelerator.get();
    }
    return nullptr;
}

// Takes the queue for a call that runs on this thread, if that is wanted and the queue is idle.
PrimsBackend::Taken PrimsBackend::take(const char* title, bool wanted) {
    return {queue_->take(title, wanted) ? queue_.get() : nullptr, [](Queue* queue) { queue->give_back(); }};
}

WorkPtr PrimsBackend::perform(std::vector<PrimsTask> tasks, const CallOptions& options, Tensors outputs) {
    check_owner();
    TORCH_CHECK_VALUE(!tasks.empty(), options.title, ": there is no tensor");
    const auto taken = take(options.title, !options.async);
    for (PrimsTask& task : tasks) task.call.sequence = sequence_++;
    const std::uint64_t sequence = sequence_;
    const std::uint64_t entry = flight_recorder_.add(entry_of(tasks.front().call, options, sequence), taken != nullptr);
    if (taken) {
        RECORD_FUNCTION_WITH_SCOPE(at::RecordScope::USER_SCOPE, options.title, inputs_of(outputs));
        run(tasks, options.timeout, entry);
        return c10::make_intrusive<DoneWork>(rank_, options.type, std::move(outputs), sequence);
    }
    auto work = c10::make_intrusive<PrimsWork>(rank_, options.type, options.title, std::move(outputs), sequence);
    const auto job = std::make_shared<Queue::Job>();
    job->title = options.title;
    job->done = work->finisher();
    job->run = [this, kept = kept(), tasks = std::move(tasks), timeout = options.timeout, entry,
                like = AsCaller()]() mutable { like.run([&] { run(tasks, timeout, entry); }); };
    if (options.async) {
        queue_->submit(job);
        work->waits_by([queue = queue_, host_segment = host_segment_, execution = execution_, job,
                        title = options.title](Milliseconds limit) {
            LongWait waiting(host_segment->membership.wait_graph());
            const auto look = [&] { look_at_queue(waiting); };
            if (queue->wait(job, limit, look)) return;
            try {
                while (!host_segment->membership.is_final(waiting.diagnosis, {kInCollective}, limit)) {
                    if (queue->wait(job, kBetweenLooks, look)) return;
                }
                host_segment->membership.throw_timeout(std::to_string(limit.count()) + " ms in the wait for " + title +
                                                           "; the group has ended, so that nothing is written late",
                                                       waiting.diagnosis.verdict());
            } catch (const CommError&) {
                execution->wake();
                queue->wait(job, Milliseconds::max(), {});  // it ends at its next check for failures
                throw;
            }
        });
    } else {
        LongWait waiting(host_segment_->membership.wait_graph());
        queue_->run(job, [&] { look_at_queue(waiting); });
        if (work->exception()) std::rethrow_exception(work->exception());
    }
    return work;
}

FlightRecorder::Entry PrimsBackend::entry_of(const Call& call, const CallOptions& options, std::uint64_t sequence) {
    FlightRecorder::Entry entry{.sequence = sequence, .count = call.count, .title = options.title};
    entry.dtype = call.collective == Collective::kBarrier ? "" : name_of(call.dtype);
    entry.timeout_ms = options.timeout.count();
    return entry;
}

void PrimsBackend::run(std::vector<PrimsTask>& tasks, Milliseconds timeout, std::uint64_t entry) {
    const at::NoGradGuard no_grad;
    flight_recorder_.start(entry);
    recorded(entry, [&] {
        for (const PrimsTask& task : tasks) task.run(task.call, timeout);
    });
}

template <typename Work>
void PrimsBackend::recorded(std::uint64_t entry, const Work& work) {
    try {
        work();
    } catch (...) {
        flight_recorder_.end(entry, false);
        write_record();
        execution_->forward_notice();
        throw;
    }
    flight_recorder_.end(entry, true);
}

void PrimsBackend::write_record() const {
    if (!setup_.dump.empty()) std::ofstream(setup_.dump) << record();
}

void PrimsBackend::all_reduce_now(at::Tensor tensor, const c10d::ReduceOp& op) {
    check_owner();
    const bool is_plain = tensor.is_cpu() && tensor.layout() == at::kStrided && packed(tensor).is_same(tensor) &&
                          op.op_ != c10d::ReduceOp::PREMUL_SUM && execution_->has_no_schedules();
    const CallOptions options{c10d::OpType::ALLREDUCE, "dist_prims:all_reduce", options_->timeout, false};
    const auto taken = take(options.title, is_plain);
    if (!taken) {
        c10d::AllreduceOptions opts;
        opts.reduceOp = op;
        opts.asyncOp = false;
        Tensors tensors{std::move(tensor)};
        allreduce(tensors, opts)->wait();
        return;
    }
    const auto count = static_cast<std::size_t>(tensor.numel());
    Call call = call_of(Collective::kAllReduce, tensor, count);
    call.op = checked("all_reduce", op, tensor);
    call.sequence = sequence_++;
    call.tensor_ref = host_segment_->tensor_ref_of(bytes_of(tensor), count * size_of(call.dtype));
    recorded(flight_recorder_.add(entry_of(call, options, sequence_), true), [&] {
        host_segment_->slots.open(call, options.timeout);
        all_reduce(*host_segment_, call.dtype, call.op, bytes_of(tensor), bytes_of(tensor), count, call.tensor_ref);
    });
}

at::Tensor PrimsBackend::allocateTensor(long size, at::TensorOptions options) {
    return shared_tensor({size}, options.dtype().toScalarType());
}

WorkPtr PrimsBackend::message(c10d::OpType type, const char* title, Tensors& tensors, int peer, int tag) {
    check_owner();
    const auto& tensor = only(title, tensors);
    const bool outgoing = type == c10d::OpType::SEND;
    TORCH_CHECK_VALUE(peer < size_ && (peer >= 0 || type == c10d::OpType::RECVANYSOURCE), title, ": rank ", peer,
                      " is not in a group of ", size_, " ranks");
    if (!outgoing) must_be_distinct(title, tensor);
    FlightRecorder::Entry entry{
        .sequence = ++messages_, .count = static_cast<std::uint64_t>(tensor.numel()), .title = title};
    entry.dtype = name_of(type_of(tensor));
    entry.timeout_ms = options_->timeout.count();
    entry.point_to_point = true;
    const std::uint64_t number = flight_recorder_.add(entry, true);

    auto work = c10::make_intrusive<PrimsWork>(rank_, type, title, tensors, messages_);
    const Output data(tensor);
    auto done = [this, kept = kept(), data, outgoing, number, like = AsCaller(),
                 finish = work->finisher()](std::exception_ptr error) {
        if (!outgoing && !error) error = caught([&] { like.run([&] { data.deliver(); }); });
        caught([&] {
            flight_recorder_.end(number, !error);
            if (error) write_record();
        });
        return finish(error);
    };
    const auto bytes = static_cast<std::size_t>(tensor.nbytes());
    const auto key = static_cast<std::uint32_t>(tag);
    PointToPoint& p2p = host_segment_->p2p;
    const auto request = outgoing ? p2p.send(peer, key, data.data(), bytes, options_->timeout, done)
                                  : p2p.receive(peer, key, data.data(), bytes, options_->timeout, done);
    work->comes_from(std::shared_ptr<const int>(request, &request->peer));
    work->waits_by([host_segment = host_segment_, request](Milliseconds limit) {
        if (host_segment->p2p.wait(request, limit)) return;
        try {
            LongWait waiting(host_segment->membership.wait_graph());
            do {
                waiting.published.set(host_segment->p2p.wait_for(request));
                if (host_segment->p2p.wait(request, kBetweenLooks)) return;
            } while (
                !host_segment->membership.is_final(waiting.diagnosis, {host_segment->p2p.wait_for(request)}, limit));
            host_segment->membership.throw_timeout(
                std::to_string(limit.count()) + " ms in the wait for " + host_segment->p2p.text(*request),
                waiting.diagnosis.verdict());
        } catch (const CommError&) {
            host_segment->p2p.wait(request, Milliseconds::max());  // it ends at its next check for failures
            throw;
        }
    });
    return work;
}

// The backend that carries a user's message; null: shared memory.
c10d::Backend* PrimsBackend::elsewhere(const Tensors& tensors, int tag) {
    auto* const backend = other(tensors);
    return backend ? backend : execution_->carrier(tag);
}

WorkPtr PrimsBackend::send(Tensors& tensors, int to, int tag) {
    if (auto* who = elsewhere(tensors, tag)) return who->send(tensors, to, tag);
    return message(c10d::OpType::SEND, "dist_prims:send", tensors, to, tag);
}

WorkPtr PrimsBackend::recv(Tensors& tensors, int from, int tag) {
    if (auto* who = elsewhere(tensors, tag)) return who->recv(tensors, from, tag);
    return message(c10d::OpType::RECV, "dist_prims:recv", tensors, from, tag);
}

WorkPtr PrimsBackend::recvAnysource(Tensors& tensors, int tag) {
    if (auto* who = elsewhere(tensors, tag)) return who->recvAnysource(tensors, tag);
    return message(c10d::OpType::RECVANYSOURCE, "dist_prims:recv", tensors, PointToPoint::kAnyone, tag);
}

}  // namespace dist_prims
