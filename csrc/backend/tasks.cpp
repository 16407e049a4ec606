// Each collective as a task: checked, its memory ready, told as a Call, and done on the room's board; or, where the
// group spans hosts or a schedule is pinned, by a plan.
#include <algorithm>
#include <numeric>

#include "../core/kernels.h"
#include "backend.h"

namespace dist_prims {
namespace {

std::vector<int64_t> sizes_of(const Tensors& tensors) {
    std::vector<int64_t> found;
    for (const auto& tensor : tensors) found.push_back(tensor.numel());
    return found;
}

}  // namespace

PrimsBackend::Task PrimsBackend::all_reduce_task(const at::Tensor& tensor, const c10d::ReduceOp& op) {
    const Op kind = checked("all_reduce", op, tensor);
    const at::Tensor input = packed(premultiplied(tensor, op));
    const Output output(tensor);
    const std::size_t count = static_cast<std::size_t>(tensor.numel());
    Task task{call_of(Collective::kAllReduce, tensor, count), {}};
    task.call.op = kind;
    const std::size_t bytes = count * size_of(task.call.dtype);
    if (span_ && span_->is_small(bytes)) {
        task.across = [=, this](const Call& call, Milliseconds timeout) {
            span_->all_reduce(call, bytes_of(input), output.data(), timeout);
            output.deliver();
        };
    } else if (const PlannedPtr plan = planned(Collective::kAllReduce, bytes)) {
        task.call.by(plan->name);
        task.across = [=, this](const Call& call, Milliseconds timeout) {
            agree(call, timeout);
            if (input.data_ptr() != output.flat.data_ptr()) output.flat.copy_(input);
            follow(*plan, call, {output.data(), count}, timeout);
            if (kind == Op::kAvg) divide(call.dtype, output.data(), size_, count);
            output.deliver();
        };
    } else {
        if (input.is_same(tensor)) task.call.loan = Lender::instance().loan(bytes_of(tensor), bytes);
        task.run = [=, call = task.call](Room& room) {
            all_reduce(room, call.dtype, kind, bytes_of(input), output.data(), count, call.loan);
            output.deliver();
        };
    }
    return task;
}

PrimsBackend::Task PrimsBackend::all_reduce_gradual_task(const at::Tensor& tensor,
                                                         const std::shared_ptr<Gradual>& gradual,
                                                         std::uint64_t number) {
    Task task = all_reduce_task(tensor, c10d::ReduceOp::SUM);
    if (task.across) {  // since it has begun, a schedule was pinned
        gradual->settle();
        return task;
    }
    task.call.by("gradual " + std::to_string(number) + ", round " + std::to_string(gradual->round()));
    task.run = [gradual](Room& room) { gradual->finish(room); };
    return task;
}

PrimsBackend::Task PrimsBackend::broadcast_task(const at::Tensor& tensor, int root) {
    const Output output(tensor);
    const auto count = static_cast<std::size_t>(tensor.numel()), bytes = static_cast<std::size_t>(tensor.nbytes());
    Task task{call_of(Collective::kBroadcast, tensor, count), {}};
    task.call.root = root;
    if (const PlannedPtr plan = planned(Collective::kBroadcast, bytes, root)) {
        task.call.by(plan->name);
        task.across = [=, this](const Call& call, Milliseconds timeout) {
            agree(call, timeout);
            follow(*plan, call, {output.data(), count}, timeout);
            if (rank_ != root) output.deliver();
        };
    } else {
        task.run = [=](Room& room) {
            dist_prims::broadcast(room.board, bytes, root, output.data());
            if (room.board.rank() != root) output.deliver();
        };
    }
    return task;
}

PrimsBackend::Task PrimsBackend::reduce_task(const at::Tensor& tensor, const c10d::ReduceOp& op, int root) {
    const Op kind = checked("reduce", op, tensor);
    const at::Tensor input = packed(premultiplied(tensor, op));
    const Output output(tensor);
    const std::size_t count = static_cast<std::size_t>(tensor.numel());
    Task task{call_of(Collective::kReduce, tensor, count), {}};
    task.call.op = kind;
    task.call.root = root;
    if (const PlannedPtr plan = planned(Collective::kReduce, static_cast<std::size_t>(tensor.nbytes()), root)) {
        task.call.by(plan->name);
        task.across = [=, this](const Call& call, Milliseconds timeout) {
            agree(call, timeout);
            const at::Tensor sum = input.clone();
            follow(*plan, call, {bytes_of(sum), count}, timeout);
            if (rank_ != root) return;
            if (kind == Op::kAvg) divide(call.dtype, bytes_of(sum), size_, count);
            output.tensor.copy_(sum.view_as(output.tensor));
        };
    } else {
        task.run = [=, dtype = task.call.dtype](Room& room) {
            dist_prims::reduce(room, dtype, kind, root, bytes_of(input), output.data(), count);
            if (room.board.rank() == root) output.deliver();
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
    task.call.layout = checksum(given);
    if (const PlannedPtr plan = planned(Collective::kAllGather, task.call.count * size_of(task.call.dtype))) {
        task.call.by(plan->name);
        task.across = [=, this](const Call& call, Milliseconds timeout) {
            agree(call, timeout);
            const at::Tensor all = at::empty({static_cast<int64_t>(call.count)}, tensor.options());
            const Tensors parts = all.split_with_sizes(sizes_of(given));
            parts[static_cast<std::size_t>(rank_)].copy_(input.view(-1));
            follow(*plan, call, {bytes_of(all), call.count, counts}, timeout);
            for (std::size_t peer = 0; peer < given.size(); ++peer) given[peer].copy_(parts[peer].view_as(given[peer]));
        };
    } else {
        task.run = [=](Room& room) {
            dist_prims::all_gather(room.board, bytes_of(input), outputs.places(), bytes);
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
    for (const auto& each : given) inputs.push_back(packed(premultiplied(each, op)));
    const Output output(tensor);
    const Counts counts = elements(given);
    Task task{
        call_of(Collective::kReduceScatter, tensor, std::accumulate(counts.begin(), counts.end(), std::size_t{0})), {}};
    task.call.op = kind;
    task.call.layout = checksum(given);
    if (const PlannedPtr plan = planned(Collective::kReduceScatter, task.call.count * size_of(task.call.dtype))) {
        task.call.by(plan->name);
        task.across = [=, this](const Call& call, Milliseconds timeout) {
            agree(call, timeout);
            const at::Tensor all = at::empty({static_cast<int64_t>(call.count)}, tensor.options());
            const Tensors parts = all.split_with_sizes(sizes_of(given));
            for (std::size_t peer = 0; peer < given.size(); ++peer) parts[peer].copy_(inputs[peer].view(-1));
            follow(*plan, call, {bytes_of(all), call.count, counts}, timeout);
            const at::Tensor& mine = parts[static_cast<std::size_t>(rank_)];
            if (kind == Op::kAvg) divide(call.dtype, bytes_of(mine), size_, counts[static_cast<std::size_t>(rank_)]);
            output.tensor.copy_(mine.view_as(output.tensor));
        };
    } else {
        task.run = [=, dtype = task.call.dtype](Room& room) {
            dist_prims::reduce_scatter(room.board, dtype, kind, blocks_of(inputs), output.data(), counts);
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
    if (span_) {
        task.across = [=, this](const Call& call, Milliseconds timeout) {
            exchange(call, blocks_of(inputs), outgoing, outputs.places(), incoming, timeout);
            outputs.deliver();
        };
    } else {
        task.run = [=](Room& room) {
            dist_prims::all_to_all(room.board, blocks_of(inputs), outgoing, outputs.places(), incoming);
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
    if (span_) {
        task.across = [=, this](const Call& call, Milliseconds timeout) {
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
            exchange(call, in, outgoing, out, incoming, timeout);
            places.deliver();
        };
    } else {
        task.run = [=](Room& room) {
            dist_prims::gather(room.board, root, bytes_of(input), bytes, places.places(), lengths(given));
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
    if (span_) {
        task.across = [=, this](const Call& call, Milliseconds timeout) {
            const auto size = static_cast<std::size_t>(size_), from = static_cast<std::size_t>(root);
            Counts outgoing(size), incoming(size);
            Places out(size);
            incoming[from] = bytes;
            out[from] = place.data();
            if (rank_ == root) outgoing = lengths(given);
            exchange(call, rank_ == root ? blocks_of(given) : Blocks(size), outgoing, out, incoming, timeout);
            place.deliver();
        };
    } else {
        task.run = [=](Room& room) {
            dist_prims::scatter(room.board, root, blocks_of(given), place.data(), bytes);
            place.deliver();
        };
    }
    return task;
}

PrimsBackend::Task PrimsBackend::barrier_task() {
    if (span_) return {Call{}, {}, [this](const Call& call, Milliseconds timeout) { agree(call, timeout); }};
    return {Call{}, [](Room& room) { dist_prims::barrier(room.board); }};
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
