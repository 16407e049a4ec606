// Each collective of PrimsBackend: the Call on which the ranks must agree, with the task that its Execution makes of
// it.
#include <numeric>

#include "backend.h"

namespace dist_prims {
namespace {

std::size_t sum_of(const Counts& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

std::size_t longest_of(const Tensors& tensors) {
    std::size_t longest = 0;
    for (const auto& tensor : tensors) longest = std::max<std::size_t>(longest, tensor.nbytes());
    return longest;
}

Tensors all_packed(const Tensors& tensors) {
    Tensors found;
    for (const auto& tensor : tensors) found.push_back(packed(tensor));
    return found;
}

// The names of ProcessGroupNCCL's events.
const char* profiled_name(Collective collective) {
    constexpr std::array kNames{"allreduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
                                "gather",    "scatter",        "all_to_all", "barrier"};
    return kNames[static_cast<std::size_t>(collective)];
}

Call call_of_all(Collective collective, const at::Tensor& tensor) {
    return call_of(collective, tensor, static_cast<std::size_t>(tensor.numel()));
}

// The task that `make` makes for these outputs. If an output overlaps an input or another output, a collective would
// write what it has still to read, so the task gets staging buffers, and copies them to the outputs in the order of the
// blocks.
template <typename Make>
PrimsTask without_overlap(const Tensors& inputs, const Tensors& outputs, const Make& make) {
    if (!outputs_overlap(inputs, outputs)) return make(outputs);
    Tensors staged = outputs;
    for (at::Tensor& each : staged) {
        if (each.defined()) each = at::empty(each.sizes(), each.options());
    }
    PrimsTask task = make(staged);
    task.run = [run = std::move(task.run), staged, outputs](const Call& call, Milliseconds timeout) {
        run(call, timeout);
        for (std::size_t block = 0; block < outputs.size(); ++block) {
            if (outputs[block].defined()) outputs[block].copy_(staged[block]);
        }
    };
    return task;
}

}  // namespace

WorkPtr PrimsBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
    const at::Tensor& tensor = tensors.at(0);
    if (tensor.is_cpu() && tensor.layout() != at::kStrided) {
        const auto record = profiled("allreduce_sparse", opts.asyncOp, tensors, tensors);
        return gloo()->allreduce(tensors, opts);
    }
    return CollectiveBackend::allreduce(tensors, opts);
}

WorkPtr PrimsBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
    auto* const backend = delegate(tensors);
    const auto record = profiled("allreduce_sparse", opts.asyncOp, tensors, tensors);
    return (backend ? backend : gloo())->allreduce(tensors, opts);
}

WorkPtr PrimsBackend::barrier(const c10d::BarrierOptions& opts) {
    if (setup_->accelerator && opts.device && !opts.device->is_cpu()) return setup_->accelerator->barrier(opts);
    return CollectiveBackend::barrier(opts);
}

PrimsTask PrimsBackend::all_reduce_task(const at::Tensor& input, const at::Tensor& output, Op op) {
    Call call = call_of_all(Collective::kAllReduce, output);
    call.op = op;
    return execution_->all_reduce(call, packed(input), output);
}

WorkPtr PrimsBackend::all_reduce_incremental(const at::Tensor& tensor,
                                             const std::shared_ptr<IncrementalReduce>& incremental,
                                             std::uint64_t number, bool async) {
    const auto record = profiled("allreduce", async, tensor, tensor);
    PrimsTask task = all_reduce_task(tensor, tensor, Op::kSum);
    const bool is_pinned = execution_->schedule_for(Collective::kAllReduce, tensor.nbytes(), -1) != nullptr;
    if (is_pinned) {  // after the sum had begun
        incremental->settle();
    } else {
        task.call.by("incremental reduce " + std::to_string(number) + ", round " +
                     std::to_string(incremental->round()));
        task.run = [this, incremental](const Call& call, Milliseconds timeout) {
            host_segment_->slots.open(call, timeout);
            incremental->finish(*host_segment_);
        };
    }
    return start(std::move(task), call_options(Collective::kAllReduce, async), {tensor});
}

PrimsTask PrimsBackend::broadcast_task(const at::Tensor& tensor, int root) {
    Call call = call_of_all(Collective::kBroadcast, tensor);
    call.root = root;
    return execution_->broadcast(call, tensor);
}

PrimsTask PrimsBackend::reduce_task(const at::Tensor& input, const at::Tensor& output, Op op, int root) {
    Call call = call_of_all(Collective::kReduce, output);
    call.op = op;
    call.root = root;
    return execution_->reduce(call, packed(input), output);
}

PrimsTask PrimsBackend::all_gather_task(const at::Tensor& input, const Tensors& outputs) {
    const Counts counts = elements(outputs);
    Call call = call_of(Collective::kAllGather, input, sum_of(counts));
    call.layout = checksum(counts);
    const at::Tensor given = packed(input);
    return without_overlap(execution_->own_block(given), outputs,
                           [&](const Tensors& to) { return execution_->all_gather(call, given, to); });
}

PrimsTask PrimsBackend::reduce_scatter_task(const Tensors& inputs, const at::Tensor& output, Op op) {
    const Counts counts = elements(inputs);
    Call call = call_of(Collective::kReduceScatter, output, sum_of(counts));
    call.op = op;
    call.layout = checksum(counts);
    const Tensors given = all_packed(inputs);
    const auto own = static_cast<std::size_t>(rank_);
    return without_overlap(given, execution_->own_block(output),
                           [&](const Tensors& to) { return execution_->reduce_scatter(call, given, to[own]); });
}

PrimsTask PrimsBackend::all_to_all_task(const Tensors& inputs, const Tensors& outputs) {
    Call call = call_of(Collective::kAllToAll, inputs[0], 0);
    call.longest = std::max(longest_of(inputs), longest_of(outputs));
    const Tensors given = all_packed(inputs);
    if (!spans_hosts() && !execution_->has_pins(Collective::kAllToAll))
        return without_overlap(given, outputs,
                               [&](const Tensors& to) { return execution_->all_to_all(call, given, to); });
    // The blocks that a schedule receives are not those that it sends, so there an exchange in place is an overlap too.
    Tensors received(outputs.size());
    received.insert(received.end(), outputs.begin(), outputs.end());
    return without_overlap(given, received, [&](const Tensors& to) {
        return execution_->all_to_all(call, given, {to.end() - size_, to.end()});
    });
}

PrimsTask PrimsBackend::gather_task(const at::Tensor& input, const Tensors& outputs, int root) {
    Call call = call_of(Collective::kGather, input, 0);
    call.root = root;
    call.longest = input.nbytes();
    const at::Tensor given = packed(input);
    return without_overlap(execution_->own_block(given), outputs,
                           [&](const Tensors& to) { return execution_->gather(call, given, to); });
}

PrimsTask PrimsBackend::scatter_task(const Tensors& inputs, const at::Tensor& output, int root) {
    for (const auto& each : inputs)
        TORCH_CHECK_VALUE(each.numel() == output.numel(), "scatter: a tensor of ", each.numel(),
                          " elements in the list; ", output.numel(), " are needed");
    Call call = call_of_all(Collective::kScatter, output);
    call.root = root;
    const Tensors given = all_packed(inputs);
    const auto own = static_cast<std::size_t>(rank_);
    return without_overlap(given, execution_->own_block(output),
                           [&](const Tensors& to) { return execution_->scatter(call, given, to[own]); });
}

WorkPtr PrimsBackend::run_schedule(const ScheduledCall& given, bool async) {
    const auto record = profiled(profiled_name(given.collective), async, given.inputs, given.outputs, given.root);
    const auto options = call_options(given.collective, async);
    const at::Tensor& like = first_defined(given.inputs, given.outputs);
    Call call = call_of(given.collective, like, sum_of(given.counts));
    if (given.collective == Collective::kAllToAll) return start(exchange_task(given, call), options, {like});
    if (given.reduces) call.op = checked(name_of(given.collective), given.op, like);
    if (given.counts.size() > 1) call.layout = checksum(given.counts);
    call.root = given.root;
    const auto make = [&](const Tensors& to) {
        return execution_->by_schedule(given.schedule, call, given.inputs, to, given.counts, given.check);
    };
    return start(without_overlap(given.inputs, given.outputs, make), options, {like});
}

// The ranks agree on the number of elements only if each has blocks of one length.
PrimsTask PrimsBackend::exchange_task(const ScheduledCall& given, Call call) {
    const auto size = static_cast<std::ptrdiff_t>(given.inputs.size() / 2);
    const Tensors sent(given.inputs.begin(), given.inputs.begin() + size);
    call.count = given.is_even ? call.count / 2 : 0;
    return without_overlap(given.inputs, given.outputs, [&](const Tensors& to) {
        const Tensors received(to.begin() + size, to.end());
        return execution_->exchange_by(given.schedule, call, execution_->all_to_all_blocks(sent, received),
                                       given.check);
    });
}

}  // namespace dist_prims

template class dist_prims::CollectiveBackend<dist_prims::PrimsTask>;
