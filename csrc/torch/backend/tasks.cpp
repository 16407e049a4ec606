// Each collective as a task: its arguments are checked, its inputs are contiguous, and its Call is filled in.
#include <algorithm>
#include <map>
#include <numeric>

#include "backend.h"

namespace dist_prims {
namespace {

std::size_t sum_of(const Counts& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

Tensors all_packed(const Tensors& tensors) {
    Tensors found;
    for (const auto& tensor : tensors) found.push_back(packed(tensor));
    return found;
}

}  // namespace

PrimsTask PrimsBackend::all_reduce_task(const at::Tensor& tensor, const c10d::ReduceOp& op) {
    Call call = call_of(Collective::kAllReduce, tensor, static_cast<std::size_t>(tensor.numel()));
    call.op = checked("all_reduce", op, tensor);
    return execution_->all_reduce(call, packed(premultiplied("all_reduce", tensor, op)), tensor);
}

PrimsTask PrimsBackend::all_reduce_incremental_task(const at::Tensor& tensor,
                                                    const std::shared_ptr<IncrementalReduce>& incremental,
                                                    std::uint64_t number) {
    if (execution_->schedule_for(Collective::kAllReduce, tensor.nbytes())) {  // it was pinned after the sum had begun
        incremental->settle();
        return all_reduce_task(tensor, c10d::ReduceOp::SUM);
    }
    PrimsTask task = all_reduce_task(tensor, c10d::ReduceOp::SUM);
    task.call.by("gradual " + std::to_string(number) + ", round " + std::to_string(incremental->round()));
    task.run = [this, incremental](const Call& call, Milliseconds timeout) {
        host_segment_->slots.open(call, timeout);
        incremental->finish(*host_segment_);
    };
    return task;
}

PrimsTask PrimsBackend::broadcast_task(const at::Tensor& tensor, int root) {
    Call call = call_of(Collective::kBroadcast, tensor, static_cast<std::size_t>(tensor.numel()));
    call.root = root;
    return execution_->broadcast(call, tensor);
}

PrimsTask PrimsBackend::reduce_task(const at::Tensor& tensor, const c10d::ReduceOp& op, int root) {
    Call call = call_of(Collective::kReduce, tensor, static_cast<std::size_t>(tensor.numel()));
    call.op = checked("reduce", op, tensor);
    call.root = root;
    return execution_->reduce(call, packed(premultiplied("reduce", tensor, op)), tensor);
}

PrimsTask PrimsBackend::all_gather_task(const Tensors& outputs, const at::Tensor& input) {
    as_many("all_gather", outputs.size(), size_);
    alike("all_gather", outputs, input);
    const auto own = outputs[static_cast<std::size_t>(rank_)].numel();
    TORCH_CHECK_VALUE(own == input.numel(), "all_gather: rank ", rank_, " gives ", input.numel(),
                      " elements and expects ", own, " from itself");
    const Counts counts = elements(outputs);
    Call call = call_of(Collective::kAllGather, input, sum_of(counts));
    call.layout = checksum(counts);
    return execution_->all_gather(call, packed(input), outputs);
}

PrimsTask PrimsBackend::reduce_scatter_task(const at::Tensor& output, const Tensors& given, const c10d::ReduceOp& op) {
    const Op kind = checked("reduce_scatter", op, output);
    as_many("reduce_scatter", given.size(), size_);
    alike("reduce_scatter", given, output);
    const auto own = given[static_cast<std::size_t>(rank_)].numel();
    TORCH_CHECK_VALUE(own == output.numel(), "reduce_scatter: rank ", rank_, " has room for ", output.numel(),
                      " elements and gives ", own, " to itself");
    Tensors inputs;
    for (const auto& each : given) inputs.push_back(packed(premultiplied("reduce_scatter", each, op)));
    const Counts counts = elements(inputs);
    Call call = call_of(Collective::kReduceScatter, output, sum_of(counts));
    call.op = kind;
    call.layout = checksum(counts);
    return execution_->reduce_scatter(call, inputs, output);
}

PrimsTask PrimsBackend::all_to_all_task(const Tensors& outputs, const Tensors& inputs) {
    as_many("all_to_all", outputs.size(), size_);
    as_many("all_to_all", inputs.size(), size_);
    alike("all_to_all", outputs, inputs[0]);
    alike("all_to_all", inputs, inputs[0]);
    Call call = call_of(Collective::kAllToAll, inputs[0], 0);
    for (const Counts& bytes : {lengths(inputs), lengths(outputs)})
        call.longest = std::max<std::uint64_t>(call.longest, *std::max_element(bytes.begin(), bytes.end()));
    return execution_->all_to_all(call, all_packed(inputs), outputs);
}

PrimsTask PrimsBackend::gather_task(const Tensors& outputs, const at::Tensor& input, int root) {
    Call call = call_of(Collective::kGather, input, 0);
    call.root = root;
    call.longest = input.nbytes();
    return execution_->gather(call, packed(input), outputs);
}

PrimsTask PrimsBackend::scatter_task(const at::Tensor& output, const Tensors& inputs, int root) {
    for (const auto& each : inputs)
        TORCH_CHECK_VALUE(each.numel() == output.numel(), "scatter: a tensor of ", each.numel(),
                          " elements in the list; ", output.numel(), " are needed");
    Call call = call_of(Collective::kScatter, output, static_cast<std::size_t>(output.numel()));
    call.root = root;
    return execution_->scatter(call, all_packed(inputs), output);
}

PrimsTask PrimsBackend::barrier_task() {
    return execution_->barrier(Call{});
}

WorkPtr PrimsBackend::run_schedule(const ScheduledCall& given, bool async) {
    static const std::map<Collective, std::pair<c10d::OpType, const char*>> kTitles = {
        {Collective::kAllReduce, {c10d::OpType::ALLREDUCE, "dist_prims:all_reduce"}},
        {Collective::kReduceScatter, {c10d::OpType::REDUCE_SCATTER, "dist_prims:reduce_scatter"}},
        {Collective::kAllGather, {c10d::OpType::ALLGATHER, "dist_prims:all_gather"}},
        {Collective::kBroadcast, {c10d::OpType::BROADCAST, "dist_prims:broadcast"}},
        {Collective::kReduce, {c10d::OpType::REDUCE, "dist_prims:reduce"}}};
    const auto& [type, title] = kTitles.at(given.collective);
    const at::Tensor& like = first_defined(given.inputs, given.outputs);
    Call call = call_of(given.collective, like, sum_of(given.counts));
    if (given.reduces) call.op = checked(name_of(given.collective), given.op, like);
    if (given.counts.size() > 1) call.layout = checksum(given.counts);
    call.root = given.root;
    return perform(
        alone(execution_->by_schedule(given.schedule, call, given.inputs, given.outputs, given.counts, given.check)),
        {type, title, options_->timeout, async}, {like});
}

Tensors PrimsBackend::blocks(const at::Tensor& tensor, const std::vector<int64_t>& splits, const char* what) const {
    if (splits.empty()) {
        const at::Tensor flat = tensor.view(-1);
        TORCH_CHECK_VALUE(flat.numel() % size_ == 0, what, ": ", flat.numel(), " elements cannot be shared evenly by ",
                          size_, " ranks");
        return flat.split(std::max<int64_t>(flat.numel() / size_, 1)).size() == static_cast<std::size_t>(size_)
                   ? flat.split(flat.numel() / size_)
                   : Tensors(static_cast<std::size_t>(size_), flat);  // nothing for anybody
    }
    const int64_t rows = tensor.dim() ? tensor.size(0) : 1;
    TORCH_CHECK_VALUE(splits.size() == static_cast<std::size_t>(size_) &&
                          std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows,
                      what, ": ", splits.size(), " split sizes must be ", size_, " and add up to ", rows);
    return tensor.split_with_sizes(splits);
}

int PrimsBackend::root(const char* what, int64_t given) const {
    TORCH_CHECK_VALUE(given >= 0 && given < size_, what, ": root ", given, " is not in a group of ", size_, " ranks");
    return static_cast<int>(given);
}

}  // namespace dist_prims
