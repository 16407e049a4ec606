// Each collective as a task: its arguments are checked, its memory is ready, and its Call is filled in. It runs on the
// slots of the host segment; or by a schedule, where the group spans hosts or a schedule is pinned.
#include <algorithm>
#include <numeric>
#include <tuple>

#include "backend.h"

namespace dist_prims {
namespace {

// The owner that a transport keeps while it still needs the memory; see net/transport.h.
template <typename... Kept>
Transport::Owner owner_of(const Kept&... kept) {
    return std::make_shared<const std::tuple<Kept...>>(kept...);
}

}  // namespace

PrimsBackend::Task PrimsBackend::all_reduce_task(const at::Tensor& tensor, const c10d::ReduceOp& op) {
    const Op kind = checked("all_reduce", op, tensor);
    const at::Tensor input = packed(premultiplied("all_reduce", tensor, op));
    const Output output(tensor);
    const std::size_t count = static_cast<std::size_t>(tensor.numel());
    Task task{call_of(Collective::kAllReduce, tensor, count), {}};
    task.call.op = kind;
    const std::size_t bytes = count * size_of(task.call.dtype);
    if (multi_host_ && multi_host_->is_small(bytes)) {
        task.run_scheduled = [=, this](const Call& call, Milliseconds timeout) {
            multi_host_->all_reduce(call, bytes_of(input), output.data(), timeout);
            output.deliver();
        };
    } else if (const SchedulePtr schedule = schedule_for(Collective::kAllReduce, bytes)) {
        task.call.by(schedule->name);
        task.run_scheduled = [=, this](const Call& call, Milliseconds timeout) {
            agree(call, timeout);
            execute_schedule_on_blocks(*schedule, call, {input}, {output.tensor}, {count}, timeout);
        };
    } else {
        if (input.is_same(tensor)) task.call.tensor_ref = tensor_ref_of(bytes_of(tensor), bytes);
        task.run = [=, call = task.call](HostSegment& host_segment) {
            all_reduce(host_segment, call.dtype, kind, bytes_of(input), output.data(), count, call.tensor_ref);
            output.deliver();
        };
    }
    return task;
}

PrimsBackend::Task PrimsBackend::all_reduce_incremental_task(const at::Tensor& tensor,
                                                             const std::shared_ptr<IncrementalReduce>& incremental,
                                                             std::uint64_t number) {
    Task task = all_reduce_task(tensor, c10d::ReduceOp::SUM);
    if (task.run_scheduled) {  // since it has begun, a schedule was pinned
        incremental->settle();
        return task;
    }
    task.call.by("gradual " + std::to_string(number) + ", round " + std::to_string(incremental->round()));
    task.run = [incremental](HostSegment& host_segment) { incremental->finish(host_segment); };
    return task;
}

PrimsBackend::Task PrimsBackend::broadcast_task(const at::Tensor& tensor, int root) {
    const Output output(tensor);
    const auto count = static_cast<std::size_t>(tensor.numel()), bytes = static_cast<std::size_t>(tensor.nbytes());
    Task task{call_of(Collective::kBroadcast, tensor, count), {}};
    task.call.root = root;
    if (const SchedulePtr schedule = schedule_for(Collective::kBroadcast, bytes, root)) {
        task.call.by(schedule->name);
        task.run_scheduled = [=, this](const Call& call, Milliseconds timeout) {
            agree(call, timeout);
            execute_schedule(*schedule, call, output.flat, timeout);
            if (rank_ != root) output.deliver();
        };
    } else {
        task.run = [=](HostSegment& host_segment) {
            dist_prims::broadcast(host_segment.slots, bytes, root, output.data());
            if (host_segment.slots.rank() != root) output.deliver();
        };
    }
    return task;
}

PrimsBackend::Task PrimsBackend::reduce_task(const at::Tensor& tensor, const c10d::ReduceOp& op, int root) {
    const Op kind = checked("reduce", op, tensor);
    const at::Tensor input = packed(premultiplied("reduce", tensor, op));
    const Output output(tensor);
    const std::size_t count = static_cast<std::size_t>(tensor.numel());
    Task task{call_of(Collective::kReduce, tensor, count), {}};
    task.call.op = kind;
    task.call.root = root;
    if (const SchedulePtr schedule =
            schedule_for(Collective::kReduce, static_cast<std::size_t>(tensor.nbytes()), root)) {
        task.call.by(schedule->name);
        task.run_scheduled = [=, this](const Call& call, Milliseconds timeout) {
            agree(call, timeout);
            execute_schedule_on_blocks(*schedule, call, {input}, {rank_ == root ? output.tensor : at::Tensor()},
                                       {call.count}, timeout);
        };
    } else {
        task.run = [=, dtype = task.call.dtype](HostSegment& host_segment) {
            dist_prims::reduce(host_segment, dtype, kind, root, bytes_of(input), output.data(), count);
            if (host_segment.slots.rank() == root) output.deliver();
        };
    }
    return task;
}

PrimsBackend::Task PrimsBackend::all_gather_task(const Tensors& given, const at::Tensor& tensor) {
    as_many("all_gather", given.size(), size_);
    alike("all_gather", given, tensor);
    const at::Tensor input = packed(tensor);
    const Outputs outputs(given);
    const auto own = given[static_cast<std::size_t>(rank_)].numel();
    TORCH_CHECK_VALUE(own == tensor.numel(), "all_gather: rank ", rank_, " gives ", tensor.numel(),
                      " elements and expects ", own, " from itself");
    const Counts bytes = lengths(given);
    const Counts counts = elements(given);
    Task task{call_of(Collective::kAllGather, tensor, std::accumulate(counts.begin(), counts.end(), std::size_t{0})),
              {}};
    task.call.layout = checksum(counts);
    if (const SchedulePtr schedule = schedule_for(Collective::kAllGather, task.call.count * size_of(task.call.dtype))) {
        task.call.by(schedule->name);
        task.run_scheduled = [=, this](const Call& call, Milliseconds timeout) {
            agree(call, timeout);
            Tensors inputs(given.size());
            inputs[static_cast<std::size_t>(rank_)] = input;
            execute_schedule_on_blocks(*schedule, call, inputs, given, counts, timeout);
        };
    } else {
        task.run = [=](HostSegment& host_segment) {
            dist_prims::all_gather(host_segment.slots, bytes_of(input), outputs.places(), bytes);
            outputs.deliver();
        };
    }
    return task;
}

PrimsBackend::Task PrimsBackend::reduce_scatter_task(const at::Tensor& tensor, const Tensors& given,
                                                     const c10d::ReduceOp& op) {
    const Op kind = checked("reduce_scatter", op, tensor);
    as_many("reduce_scatter", given.size(), size_);
    alike("reduce_scatter", given, tensor);
    const auto own = given[static_cast<std::size_t>(rank_)].numel();
    TORCH_CHECK_VALUE(own == tensor.numel(), "reduce_scatter: rank ", rank_, " has room for ", tensor.numel(),
                      " elements and gives ", own, " to itself");
    Tensors inputs;
    for (const auto& each : given) inputs.push_back(packed(premultiplied("reduce_scatter", each, op)));
    const Output output(tensor);
    const Counts counts = elements(given);
    Task task{
        call_of(Collective::kReduceScatter, tensor, std::accumulate(counts.begin(), counts.end(), std::size_t{0})), {}};
    task.call.op = kind;
    task.call.layout = checksum(counts);
    if (const SchedulePtr schedule =
            schedule_for(Collective::kReduceScatter, task.call.count * size_of(task.call.dtype))) {
        task.call.by(schedule->name);
        task.run_scheduled = [=, this](const Call& call, Milliseconds timeout) {
            agree(call, timeout);
            Tensors outputs(given.size());
            outputs[static_cast<std::size_t>(rank_)] = output.tensor;
            execute_schedule_on_blocks(*schedule, call, inputs, outputs, counts, timeout);
        };
    } else {
        task.run = [=, dtype = task.call.dtype](HostSegment& host_segment) {
            dist_prims::reduce_scatter(host_segment.slots, dtype, kind, blocks_of(inputs), output.data(), counts);
            output.deliver();
        };
    }
    return task;
}

PrimsBackend::Task PrimsBackend::all_to_all_task(const Tensors& given, const Tensors& sent) {
    as_many("all_to_all", given.size(), size_);
    as_many("all_to_all", sent.size(), size_);
    alike("all_to_all", given, sent[0]);
    alike("all_to_all", sent, sent[0]);
    Tensors inputs;
    for (const auto& each : sent) inputs.push_back(packed(each));
    const Outputs outputs(given);
    const Counts outgoing = lengths(sent), incoming = lengths(given);
    Task task{call_of(Collective::kAllToAll, sent[0], 0), {}};
    task.call.longest = std::max(*std::max_element(outgoing.begin(), outgoing.end()),
                                 *std::max_element(incoming.begin(), incoming.end()));
    if (multi_host_) {
        task.run_scheduled = [=, this](const Call& call, Milliseconds timeout) {
            exchange(call, blocks_of(inputs), outgoing, outputs.places(), incoming, timeout, owner_of(inputs, outputs));
            outputs.deliver();
        };
    } else {
        task.run = [=](HostSegment& host_segment) {
            dist_prims::all_to_all(host_segment.slots, blocks_of(inputs), outgoing, outputs.places(), incoming);
            outputs.deliver();
        };
    }
    return task;
}

PrimsBackend::Task PrimsBackend::gather_task(const Tensors& given, const at::Tensor& tensor, int root) {
    const at::Tensor input = packed(tensor);
    const Outputs places(given);
    const auto bytes = static_cast<std::size_t>(input.nbytes());
    Task task{call_of(Collective::kGather, input, 0), {}};
    task.call.root = root;
    task.call.longest = bytes;
    if (multi_host_) {
        task.run_scheduled = [=, this](const Call& call, Milliseconds timeout) {
            const auto size = static_cast<std::size_t>(size_), to = static_cast<std::size_t>(root);
            Blocks in(size);
            Counts outgoing(size), incoming(size);
            Places out(size);
            in[to] = bytes_of(input);
            outgoing[to] = bytes;
            if (rank_ == root) {
                incoming = lengths(given);
                out = places.places();
            }
            exchange(call, in, outgoing, out, incoming, timeout, owner_of(input, places));
            places.deliver();
        };
    } else {
        task.run = [=](HostSegment& host_segment) {
            dist_prims::gather(host_segment.slots, root, bytes_of(input), bytes, places.places(), lengths(given));
            places.deliver();
        };
    }
    return task;
}

PrimsBackend::Task PrimsBackend::scatter_task(const at::Tensor& tensor, const Tensors& given, int root) {
    const Output place(tensor);
    const auto bytes = static_cast<std::size_t>(tensor.nbytes());
    Task task{call_of(Collective::kScatter, tensor, static_cast<std::size_t>(tensor.numel())), {}};
    task.call.root = root;
    if (multi_host_) {
        task.run_scheduled = [=, this](const Call& call, Milliseconds timeout) {
            const auto size = static_cast<std::size_t>(size_), from = static_cast<std::size_t>(root);
            Counts outgoing(size), incoming(size);
            Places out(size);
            incoming[from] = bytes;
            out[from] = place.data();
            if (rank_ == root) outgoing = lengths(given);
            exchange(call, rank_ == root ? blocks_of(given) : Blocks(size), outgoing, out, incoming, timeout,
                     owner_of(given, place));
            place.deliver();
        };
    } else {
        task.run = [=](HostSegment& host_segment) {
            dist_prims::scatter(host_segment.slots, root, blocks_of(given), place.data(), bytes);
            place.deliver();
        };
    }
    return task;
}

PrimsBackend::Task PrimsBackend::barrier_task() {
    if (multi_host_) return {Call{}, {}, [this](const Call& call, Milliseconds timeout) { agree(call, timeout); }};
    return {Call{}, [](HostSegment& host_segment) { dist_prims::barrier(host_segment.slots); }};
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
