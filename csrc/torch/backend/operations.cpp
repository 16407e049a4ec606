// The collectives of c10d's interface, each as a task or passed on to another backend.
#include "backend.h"

namespace dist_prims {

using c10d::OpType;

WorkPtr PrimsBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
    if (auto* who = other(tensors)) return who->allreduce(tensors, opts);
    if (tensors.at(0).layout() != at::kStrided) return gloo()->allreduce(tensors, opts);
    const auto& tensor = only("all_reduce", tensors);
    return perform(alone(all_reduce_task(tensor, opts.reduceOp)),
                   call_options(OpType::ALLREDUCE, "dist_prims:all_reduce", opts), tensors);
}

WorkPtr PrimsBackend::all_reduce_incremental(const at::Tensor& tensor,
                                             const std::shared_ptr<IncrementalReduce>& incremental,
                                             std::uint64_t number, bool async) {
    c10d::AllreduceOptions opts;
    opts.asyncOp = async;
    return perform(alone(all_reduce_incremental_task(tensor, incremental, number)),
                   call_options(OpType::ALLREDUCE, "dist_prims:all_reduce", opts), {tensor});
}

WorkPtr PrimsBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
    auto* who = other(tensors);
    return (who ? who : gloo())->allreduce(tensors, opts);
}

WorkPtr PrimsBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
    if (auto* who = other(tensors)) return who->allreduce_coalesced(tensors, opts);
    std::vector<PrimsTask> tasks;
    for (const auto& tensor : tensors) tasks.push_back(all_reduce_task(tensor, opts.reduceOp));
    return perform(std::move(tasks), call_options(OpType::ALLREDUCE_COALESCED, "dist_prims:all_reduce", opts), tensors);
}

WorkPtr PrimsBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
    if (auto* who = other(tensors)) return who->broadcast(tensors, opts);
    const auto& tensor = only("broadcast", tensors);
    return perform(alone(broadcast_task(tensor, root("broadcast", opts.rootRank))),
                   call_options(OpType::BROADCAST, "dist_prims:broadcast", opts), tensors);
}

WorkPtr PrimsBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
    if (auto* who = other(tensors)) return who->reduce(tensors, opts);
    const auto& tensor = only("reduce", tensors);
    return perform(alone(reduce_task(tensor, opts.reduceOp, root("reduce", opts.rootRank))),
                   call_options(OpType::REDUCE, "dist_prims:reduce", opts), tensors);
}

WorkPtr PrimsBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
    if (auto* who = other(inputs)) return who->allgather(outputs, inputs, opts);
    const auto& input = only("all_gather", inputs);
    return perform(alone(all_gather_task(outputs.at(0), input)),
                   call_options(OpType::ALLGATHER, "dist_prims:all_gather", opts), outputs[0]);
}

WorkPtr PrimsBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
    if (auto* who = other({input})) return who->_allgather_base(output, input, opts);
    return perform(alone(all_gather_task(blocks(output, {}, "all_gather"), input)),
                   call_options(OpType::_ALLGATHER_BASE, "dist_prims:all_gather", opts), {output});
}

WorkPtr PrimsBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) {
    if (auto* who = other(inputs)) return who->allgather_coalesced(outputs, inputs, opts);
    std::vector<PrimsTask> tasks;
    for (std::size_t each = 0; each < inputs.size(); ++each) {
        Tensors places;
        for (const auto& of_rank : outputs) places.push_back(of_rank.at(each));
        tasks.push_back(all_gather_task(places, inputs[each]));
    }
    return perform(std::move(tasks), call_options(OpType::ALLGATHER_COALESCED, "dist_prims:all_gather", opts), inputs);
}

WorkPtr PrimsBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& opts) {
    if (auto* who = other(inputs)) return who->allgather_into_tensor_coalesced(outputs, inputs, opts);
    std::vector<PrimsTask> tasks;
    for (std::size_t each = 0; each < inputs.size(); ++each) {
        tasks.push_back(all_gather_task(blocks(outputs.at(each), {}, "all_gather"), inputs[each]));
    }
    return perform(std::move(tasks), call_options(OpType::COALESCED, "dist_prims:all_gather", opts), outputs);
}

WorkPtr PrimsBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
    if (auto* who = other(inputs)) return who->gather(outputs, inputs, opts);
    const auto& input = only("gather", inputs);
    const int to = root("gather", opts.rootRank);
    const Tensors given = rank_ == to ? outputs.at(0) : Tensors();
    if (rank_ == to)
        as_many("gather", given.size(), size_);
    else
        TORCH_CHECK_VALUE(outputs.empty() || outputs[0].empty(), "gather: rank ", rank_,
                          " is not the root and takes no list");
    alike("gather", given, input);
    return perform(alone(gather_task(given, input, to)), call_options(OpType::GATHER, "dist_prims:gather", opts),
                   given);
}

WorkPtr PrimsBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
    if (auto* who = other(outputs)) return who->scatter(outputs, inputs, opts);
    const auto& output = only("scatter", outputs);
    const int from = root("scatter", opts.rootRank);
    Tensors given;
    if (rank_ == from) {
        as_many("scatter", inputs.at(0).size(), size_);
        alike("scatter", inputs[0], output);
        given = inputs[0];
    } else {
        TORCH_CHECK_VALUE(inputs.empty() || inputs[0].empty(), "scatter: rank ", rank_,
                          " is not the root and gives no list");
    }
    return perform(alone(scatter_task(output, given, from)), call_options(OpType::SCATTER, "dist_prims:scatter", opts),
                   outputs);
}

WorkPtr PrimsBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ReduceScatterOptions& opts) {
    if (auto* who = other(outputs)) return who->reduce_scatter(outputs, inputs, opts);
    const auto& output = only("reduce_scatter", outputs);
    return perform(alone(reduce_scatter_task(output, inputs.at(0), opts.reduceOp)),
                   call_options(OpType::REDUCE_SCATTER, "dist_prims:reduce_scatter", opts), outputs);
}

WorkPtr PrimsBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& opts) {
    if (auto* who = other({input})) return who->_reduce_scatter_base(output, input, opts);
    return perform(alone(reduce_scatter_task(output, blocks(packed(input), {}, "reduce_scatter"), opts.reduceOp)),
                   call_options(OpType::_REDUCE_SCATTER_BASE, "dist_prims:reduce_scatter", opts), {output});
}

WorkPtr PrimsBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& opts) {
    if (auto* who = other(inputs)) return who->reduce_scatter_tensor_coalesced(outputs, inputs, opts);
    std::vector<PrimsTask> tasks;
    for (std::size_t each = 0; each < inputs.size(); ++each) {
        tasks.push_back(
            reduce_scatter_task(outputs.at(each), blocks(packed(inputs[each]), {}, "reduce_scatter"), opts.reduceOp));
    }
    return perform(std::move(tasks), call_options(OpType::COALESCED, "dist_prims:reduce_scatter", opts), outputs);
}

WorkPtr PrimsBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                    std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
    if (auto* who = other({input})) return who->alltoall_base(output, input, output_splits, input_splits, opts);
    return perform(alone(all_to_all_task(blocks(output, output_splits, "all_to_all"),
                                         blocks(packed(input), input_splits, "all_to_all"))),
                   call_options(OpType::ALLTOALL_BASE, "dist_prims:all_to_all", opts), {output});
}

WorkPtr PrimsBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
    if (auto* who = other(inputs)) return who->alltoall(outputs, inputs, opts);
    return perform(alone(all_to_all_task(outputs, inputs)),
                   call_options(OpType::ALLTOALL, "dist_prims:all_to_all", opts), outputs);
}

WorkPtr PrimsBackend::barrier(const c10d::BarrierOptions& opts) {
    const bool elsewhere = setup_.accelerator && opts.device && !opts.device->is_cpu();
    if (auto* who = elsewhere ? setup_.accelerator.get() : other({})) return who->barrier(opts);
    return perform(alone(barrier_task()), call_options(OpType::BARRIER, "dist_prims:barrier", opts), {});
}

void PrimsBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
    check_owner();
    execution_->monitored_barrier(call_options(OpType::BARRIER, "dist_prims:barrier", opts).timeout, wait_all_ranks);
}

}  // namespace dist_prims
