// Each collective as a task: checked, its memory ready, told as a Call, and done on the room's board.
#include <algorithm>
#include <numeric>

#include "../core/kernels.h"
#include "backend.h"

namespace dist_prims {

PrimsBackend::Task PrimsBackend::all_reduce_task(const at::Tensor& tensor, const c10d::ReduceOp& op) {
    const Op kind = checked("all_reduce", op, tensor);
    const at::Tensor input = packed(premultiplied(tensor, op));
    const Output output(tensor);
    const std::size_t count = static_cast<std::size_t>(tensor.numel());
    Task task{call_of(Collective::kAllReduce, tensor, count), {}};
    task.call.op = kind;
    const std::size_t bytes = count * size_of(task.call.dtype);
    for (const Pin& pin : pins_) {
        if (bytes < pin.low || bytes >= pin.high) continue;
        task.call.by(pin.name);
        task.run = [=, this, plan = pin.plan, dtype = task.call.dtype](Room& room) {
            dist_prims::barrier(room.board);  // the ranks agree, or nothing is sent
            if (input.data_ptr() != output.flat.data_ptr()) output.flat.copy_(input);
            std::byte* data = output.data();
            execute(*plan, room.mail, planned_++, dtype, kind, data, count, options_->timeout);
            if (kind == Op::kAvg) divide(dtype, data, size_, count);
            output.deliver();
        };
        return task;
    }
    if (input.is_same(tensor)) task.call.loan = Lender::instance().loan(bytes_of(tensor), bytes);
    task.run = [=, call = task.call](Room& room) {
        all_reduce(room, call.dtype, kind, bytes_of(input), output.data(), count, call.loan);
        output.deliver();
    };
    return task;
}

PrimsBackend::Task PrimsBackend::all_gather_task(const Tensors& given, const at::Tensor& tensor) const {
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
    task.run = [=](Room& room) {
        dist_prims::all_gather(room.board, bytes_of(input), outputs.places(), bytes);
        outputs.deliver();
    };
    return task;
}

PrimsBackend::Task PrimsBackend::reduce_scatter_task(const at::Tensor& tensor, const Tensors& given,
                                                     const c10d::ReduceOp& op) const {
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
    task.run = [=, dtype = task.call.dtype](Room& room) {
        dist_prims::reduce_scatter(room.board, dtype, kind, blocks_of(inputs), output.data(), counts);
        output.deliver();
    };
    return task;
}

PrimsBackend::Task PrimsBackend::all_to_all_task(const Tensors& given, const Tensors& sent) const {
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
    task.run = [=](Room& room) {
        dist_prims::all_to_all(room.board, blocks_of(inputs), outgoing, outputs.places(), incoming);
        outputs.deliver();
    };
    return task;
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
