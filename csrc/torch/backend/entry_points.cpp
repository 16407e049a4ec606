// The entry points of PrimsBackend, in the order of c10d::Backend. torch has several functions for one collective: with
// lists of tensors, with one large tensor, coalesced (several calls at once). Each function here makes a CollectiveCall
// of its arguments, or several, and submits it; so does run_call(), for dist_prims.collectives. A call of CUDA tensors
// goes to NCCL instead, if there is one (other_backend()). Each of the two ways begins with check_owner(): submit() and
// other_backend() call it.
#include <ATen/record_function.h>

#include "../../common/process.h"
#include "backend.h"

namespace dist_prims {
namespace {

// The names of calls in errors, profiles and the flight recorder, in the order of Collective. So are the lists below.
constexpr std::array kTitles{"dist_prims:all_reduce", "dist_prims:reduce_scatter", "dist_prims:all_gather",
                             "dist_prims:broadcast",  "dist_prims:reduce",         "dist_prims:gather",
                             "dist_prims:scatter",    "dist_prims:all_to_all",     "dist_prims:barrier"};

// The names of the same calls in events of the profiler, as ProcessGroupNCCL has them.
const char* profiled_name(Collective collective) {
    constexpr std::array kNames{"allreduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
                                "gather",    "scatter",        "all_to_all", "barrier"};
    return kNames[static_cast<std::size_t>(collective)];
}

// The calls of a coalesced collective: one for each input, made by make_call(index of the input). `outputs` is the
// number of outputs, which must be the same.
template <typename MakeCall>
std::vector<CollectiveCall> calls_of(const char* what, const Tensors& inputs, std::size_t outputs,
                                     const MakeCall& make_call) {
    TORCH_CHECK_VALUE(outputs == inputs.size(), what, ": ", inputs.size(), " inputs and ", outputs, " outputs");
    std::vector<CollectiveCall> calls;
    for (std::size_t index = 0; index < inputs.size(); ++index) calls.push_back(make_call(index));
    return calls;
}

}  // namespace

void PrimsBackend::check_owner() const {
    TORCH_CHECK(owner_process_ == this_process(), "rank ", rank_,
                ": this process was forked from a rank and is not a rank ", "itself; use the group in process ",
                owner_process_, ", or start ranks with dist_prims.spawn");
    TORCH_CHECK(!awaits_members_, "rank ", rank_, ": the group was made with enable_reconfigure=True and has no ",
                "members yet; call reconfigure first");
}

CallOptions PrimsBackend::call_options(Collective collective, bool async) const {
    using c10d::OpType;
    constexpr std::array kTypes{OpType::ALLREDUCE, OpType::REDUCE_SCATTER, OpType::ALLGATHER,
                                OpType::BROADCAST, OpType::REDUCE,         OpType::GATHER,
                                OpType::SCATTER,   OpType::ALLTOALL,       OpType::BARRIER};
    const auto index = static_cast<std::size_t>(collective);
    return {kTypes[index], kTitles[index], options_->timeout, async};
}

template <typename Opts>
CallOptions PrimsBackend::call_options(Collective collective, const Opts& opts,
                                       std::optional<c10d::OpType> type) const {
    CallOptions options = call_options(collective, opts.asyncOp);
    if (opts.timeout != c10d::kUnsetTimeout) options.timeout = opts.timeout;
    if (type) options.type = *type;
    return options;
}

template <typename In, typename Out>
ProfiledCall PrimsBackend::profiled_call(const char* name, const In& inputs, const Out& outputs, int64_t peer) const {
    ProfiledCall call{.name = name,
                      .is_async = false,
                      .is_message = false,
                      .sequence = sequence_ + 1,
                      .peer = peer,
                      .inputs = {},
                      .outputs = {},
                      .input_splits = {},
                      .output_splits = {},
                      .group = pg_uid_,
                      .group_description = pg_desc_,
                      .rank = rank_,
                      .size = size_,
                      .global_ranks = options_->global_ranks_in_group};
    append_defined(call.inputs, inputs);
    append_defined(call.outputs, outputs);
    return call;
}

template <typename In, typename Out>
ProfilerRecord PrimsBackend::profiler_record(const char* name, bool async, const In& inputs, const Out& outputs,
                                             int64_t root, const std::vector<int64_t>& input_splits,
                                             const std::vector<int64_t>& output_splits) const {
    return ProfilerRecord([&] {
        ProfiledCall call = profiled_call(name, inputs, outputs, root);
        call.is_async = async;
        call.input_splits = input_splits;
        call.output_splits = output_splits;
        return call;
    });
}

ProfilerRecord PrimsBackend::message_profiler_record(const char* name, const Tensors& tensors, int peer) const {
    return ProfilerRecord([&] {
        ProfiledCall call = profiled_call(name, tensors, tensors, peer);
        call.is_async = call.is_message = true;
        call.sequence = messages_ + 1;
        return call;
    });
}

WorkPtr PrimsBackend::submit(std::vector<CollectiveCall> calls, const CallOptions& options, Tensors outputs) {
    check_owner();
    TORCH_CHECK_VALUE(!calls.empty(), options.title, ": there is no tensor");
    for (CollectiveCall& call : calls) execution_->prepare(call);
    return run_or_enqueue(std::move(calls), options, std::move(outputs));
}

WorkPtr PrimsBackend::submit(CollectiveCall call, const CallOptions& options, Tensors outputs) {
    std::vector<CollectiveCall> calls(1);
    calls[0] = std::move(call);
    return submit(std::move(calls), options, std::move(outputs));
}

WorkPtr PrimsBackend::run_call(CollectiveCall call, bool async) {
    const Collective collective = call.announced.collective;
    const auto record =
        profiler_record(profiled_name(collective), async, call.inputs, call.outputs, call.announced.root);
    const at::Tensor like = first_defined(call.inputs, call.outputs);
    return submit(std::move(call), call_options(collective, async), {like});
}

WorkPtr PrimsBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
    const at::Tensor& tensor = tensors.at(0);
    if (tensor.is_cpu() && tensor.layout() != at::kStrided) return allreduce_sparse(tensors, opts);
    if (auto* backend = other_backend(tensors)) return backend->allreduce(tensors, opts);
    const auto record = profiler_record("allreduce", opts.asyncOp, tensors, tensors);
    return submit(builder().all_reduce(only_tensor("all_reduce", tensors), opts.reduceOp),
                  call_options(Collective::kAllReduce, opts), tensors);
}

WorkPtr PrimsBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
    if (auto* backend = other_backend(tensors)) return backend->allreduce_coalesced(tensors, opts);
    const auto record = profiler_record("allreduce_coalesced", opts.asyncOp, tensors, tensors);
    std::vector<CollectiveCall> calls;
    for (const auto& tensor : tensors) calls.push_back(builder().all_reduce(tensor, opts.reduceOp));
    return submit(std::move(calls), call_options(Collective::kAllReduce, opts, c10d::OpType::ALLREDUCE_COALESCED),
                  tensors);
}

WorkPtr PrimsBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
    if (auto* backend = other_backend(tensors)) return backend->broadcast(tensors, opts);
    const auto record = profiler_record("broadcast", opts.asyncOp, tensors, tensors, opts.rootRank);
    return submit(builder().broadcast(only_tensor("broadcast", tensors), opts.rootRank),
                  call_options(Collective::kBroadcast, opts), tensors);
}

WorkPtr PrimsBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
    if (auto* backend = other_backend(tensors)) return backend->reduce(tensors, opts);
    const auto record = profiler_record("reduce", opts.asyncOp, tensors, tensors, opts.rootRank);
    return submit(builder().reduce(only_tensor("reduce", tensors), opts.reduceOp, opts.rootRank),
                  call_options(Collective::kReduce, opts), tensors);
}

WorkPtr PrimsBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
    if (auto* backend = other_backend(inputs)) return backend->allgather(outputs, inputs, opts);
    const auto record = profiler_record("all_gather", opts.asyncOp, inputs, outputs);
    const auto& input = only_tensor("all_gather", inputs);
    return submit(builder().all_gather(input, outputs.at(0)), call_options(Collective::kAllGather, opts),
                  outputs.at(0));
}

WorkPtr PrimsBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
    if (auto* backend = other_backend({input})) return backend->_allgather_base(output, input, opts);
    const auto record = profiler_record("_allgather_base", opts.asyncOp, input, output);
    return submit(builder().all_gather(input, split_into_blocks("all_gather", output, size_)),
                  call_options(Collective::kAllGather, opts, c10d::OpType::_ALLGATHER_BASE), {output});
}

WorkPtr PrimsBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) {
    if (auto* backend = other_backend(inputs)) return backend->allgather_coalesced(outputs, inputs, opts);
    const auto record = profiler_record("allgather_coalesced", opts.asyncOp, inputs, outputs);
    std::vector<CollectiveCall> calls;
    for (std::size_t index = 0; index < inputs.size(); ++index) {
        Tensors outputs_of_input;  // from each rank
        for (const auto& outputs_of_rank : outputs) outputs_of_input.push_back(outputs_of_rank.at(index));
        calls.push_back(builder().all_gather(inputs[index], outputs_of_input));
    }
    CallOptions options = call_options(Collective::kAllGather, opts, c10d::OpType::ALLGATHER_COALESCED);
    options.output_lists = outputs.size();
    Tensors outputs_of_all;  // rank by rank
    for (const auto& outputs_of_rank : outputs)
        outputs_of_all.insert(outputs_of_all.end(), outputs_of_rank.begin(), outputs_of_rank.begin() + inputs.size());
    return submit(std::move(calls), options, std::move(outputs_of_all));
}

WorkPtr PrimsBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& opts) {
    if (auto* backend = other_backend(inputs)) return backend->allgather_into_tensor_coalesced(outputs, inputs, opts);
    const auto record = profiler_record("allgather_into_tensor_coalesced", opts.asyncOp, inputs, outputs);
    auto calls = calls_of("all_gather", inputs, outputs.size(), [&](std::size_t index) {
        return builder().all_gather(inputs[index], split_into_blocks("all_gather", outputs[index], size_));
    });
    return submit(std::move(calls), call_options(Collective::kAllGather, opts, c10d::OpType::COALESCED), outputs);
}

WorkPtr PrimsBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
    if (auto* backend = other_backend(inputs)) return backend->gather(outputs, inputs, opts);
    const auto record = profiler_record("gather", opts.asyncOp, inputs, outputs, opts.rootRank);
    return submit(builder().gather(only_tensor("gather", inputs), outputs, opts.rootRank),
                  call_options(Collective::kGather, opts), rank_ == opts.rootRank ? outputs.at(0) : Tensors{});
}

// Only the root uses `output`.
WorkPtr PrimsBackend::gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) {
    Tensors inputs{input};
    std::vector<Tensors> outputs;
    if (rank_ == opts.rootRank) outputs.push_back(split_into_blocks("gather", output, size_));
    return gather(outputs, inputs, opts);
}

WorkPtr PrimsBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
    if (auto* backend = other_backend(outputs)) return backend->scatter(outputs, inputs, opts);
    const auto record = profiler_record("scatter", opts.asyncOp, inputs, outputs, opts.rootRank);
    return submit(builder().scatter(inputs, only_tensor("scatter", outputs), opts.rootRank),
                  call_options(Collective::kScatter, opts), outputs);
}

WorkPtr PrimsBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ReduceScatterOptions& opts) {
    if (auto* backend = other_backend(outputs)) return backend->reduce_scatter(outputs, inputs, opts);
    const auto record = profiler_record("reduce_scatter", opts.asyncOp, inputs, outputs);
    return submit(builder().reduce_scatter(inputs.at(0), only_tensor("reduce_scatter", outputs), opts.reduceOp),
                  call_options(Collective::kReduceScatter, opts), outputs);
}

WorkPtr PrimsBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& opts) {
    if (auto* backend = other_backend({input})) return backend->_reduce_scatter_base(output, input, opts);
    const auto record = profiler_record("_reduce_scatter_base", opts.asyncOp, input, output);
    return submit(
        builder().reduce_scatter(split_into_blocks("reduce_scatter", input.contiguous(), size_), output, opts.reduceOp),
        call_options(Collective::kReduceScatter, opts, c10d::OpType::_REDUCE_SCATTER_BASE), {output});
}

WorkPtr PrimsBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& opts) {
    if (auto* backend = other_backend(inputs)) return backend->reduce_scatter_tensor_coalesced(outputs, inputs, opts);
    const auto record = profiler_record("reduce_scatter_tensor_coalesced", opts.asyncOp, inputs, outputs);
    auto calls = calls_of("reduce_scatter", inputs, outputs.size(), [&](std::size_t index) {
        return builder().reduce_scatter(split_into_blocks("reduce_scatter", inputs[index].contiguous(), size_),
                                        outputs[index], opts.reduceOp);
    });
    return submit(std::move(calls), call_options(Collective::kReduceScatter, opts, c10d::OpType::COALESCED), outputs);
}

WorkPtr PrimsBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                    std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
    if (auto* backend = other_backend({input}))
        return backend->alltoall_base(output, input, output_splits, input_splits, opts);
    const bool is_even = input_splits.empty() && output_splits.empty();
    const auto record = profiler_record(is_even ? "all_to_all" : "all_to_allv", opts.asyncOp, input, output, -1,
                                        input_splits, output_splits);
    return submit(builder().all_to_all(split_into_blocks("all_to_all", input.contiguous(), size_, input_splits),
                                       split_into_blocks("all_to_all", output, size_, output_splits)),
                  call_options(Collective::kAllToAll, opts, c10d::OpType::ALLTOALL_BASE), {output});
}

WorkPtr PrimsBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
    if (auto* backend = other_backend(inputs)) return backend->alltoall(outputs, inputs, opts);
    const auto record = profiler_record("all_to_all", opts.asyncOp, inputs, outputs);
    return submit(builder().all_to_all(inputs, outputs), call_options(Collective::kAllToAll, opts), outputs);
}

WorkPtr PrimsBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
    check_owner();
    auto* const backend = other_backend(tensors);
    const auto record = profiler_record("allreduce_sparse", opts.asyncOp, tensors, tensors);
    return (backend ? backend : gloo_->get(rank_))->allreduce(tensors, opts);
}

WorkPtr PrimsBackend::barrier(const c10d::BarrierOptions& opts) {
    check_owner();
    if (setup_->nccl && opts.device && opts.device->is_cuda()) return setup_->nccl->barrier(opts);
    const auto record = profiler_record("barrier", opts.asyncOp, Tensors(), Tensors());
    return submit(CollectiveCall{}, call_options(Collective::kBarrier, opts), {});
}

void PrimsBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
    check_owner();
    // The limit applies to rank 0. The other ranks wait at least for the timeout of the group, as with gloo.
    const Milliseconds limit = call_options(Collective::kBarrier, opts).timeout;
    execution_->monitored_barrier(rank_ == 0 ? limit : std::max(limit, options_->timeout), wait_all_ranks);
}

WorkPtr PrimsBackend::send(Tensors& tensors, int to, int tag) {
    const auto record = message_profiler_record("send", tensors, to);
    if (auto* backend = other_backend_for_message(tensors, tag)) return backend->send(tensors, to, tag);
    return check_and_start_message(c10d::OpType::SEND, "dist_prims:send", tensors, to, tag);
}

WorkPtr PrimsBackend::recv(Tensors& tensors, int from, int tag) {
    const auto record = message_profiler_record("recv", tensors, from);
    if (auto* backend = other_backend_for_message(tensors, tag)) return backend->recv(tensors, from, tag);
    return check_and_start_message(c10d::OpType::RECV, "dist_prims:recv", tensors, from, tag);
}

WorkPtr PrimsBackend::recvAnysource(Tensors& tensors, int tag) {
    const auto record = message_profiler_record("recv", tensors, -1);
    if (auto* backend = other_backend_for_message(tensors, tag)) return backend->recvAnysource(tensors, tag);
    return check_and_start_message(c10d::OpType::RECVANYSOURCE, "dist_prims:recv", tensors, -1, tag);
}

WorkPtr PrimsBackend::check_and_start_message(c10d::OpType type, const char* title, const Tensors& tensors, int peer,
                                              int tag) {
    check_owner();
    const auto& tensor = only_tensor(title, tensors);
    TORCH_CHECK_VALUE(type == c10d::OpType::RECVANYSOURCE || (peer >= 0 && peer < size_), title, ": rank ", peer,
                      " is not in a group of ", size_, " ranks");
    if (type != c10d::OpType::SEND) must_be_distinct(title, tensor);
    return coalesced(
        start_message({type, title, options_->timeout, true}, tensors, peer, static_cast<std::uint32_t>(tag)));
}

void PrimsBackend::startCoalescing() {
    if (!setup_->nccl) return Backend::startCoalescing();  // throws
    setup_->nccl->startCoalescing();
    const std::lock_guard lock(coalesced_guard_);
    coalesced_.emplace();
}

WorkPtr PrimsBackend::endCoalescing() {
    if (!setup_->nccl) return Backend::endCoalescing();  // throws
    WorkPtr of_nccl = setup_->nccl->endCoalescing();     // null without calls of CUDA tensors
    const std::lock_guard lock(coalesced_guard_);
    std::vector<WorkPtr> works = std::exchange(coalesced_, std::nullopt).value_or(std::vector<WorkPtr>());
    if (works.empty()) return of_nccl;
    if (of_nccl) works.push_back(std::move(of_nccl));
    return c10::make_intrusive<CoalescedWork>(std::move(works));
}

WorkPtr PrimsBackend::coalesced(WorkPtr work) {
    if (!setup_->nccl) return work;
    const std::lock_guard lock(coalesced_guard_);
    if (coalesced_) coalesced_->push_back(work);
    return work;
}

WorkPtr PrimsBackend::all_reduce_incremental(const at::Tensor& tensor,
                                             const std::shared_ptr<IncrementalReduce>& incremental,
                                             std::uint64_t number, bool async) {
    const auto record = profiler_record("allreduce", async, tensor, tensor);
    CollectiveCall call = builder().all_reduce(tensor, c10d::ReduceOp::SUM);
    if (execution_->schedule_for(Collective::kAllReduce, tensor.nbytes(), -1)) {
        // A schedule was pinned after the sum had begun: copy what is deferred, and run the schedule.
        incremental->copy_deferred();
    } else {
        call.incremental = incremental;
        call.announced.set_algorithm("incremental reduce " + std::to_string(number) + ", round " +
                                     std::to_string(incremental->round()));
    }
    return submit(std::move(call), call_options(Collective::kAllReduce, async), {tensor});
}

}  // namespace dist_prims
