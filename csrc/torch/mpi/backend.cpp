#include "backend.h"

#include <unistd.h>

#include <cmath>
#include <numeric>

#include "../../common/kernels.h"
#include "../../common/thread.h"
#include "flat.h"
#include "progress.h"
#include "work.h"

namespace dist_prims::mpi {
namespace {

using c10d::OpType;

// Where MPI puts the reduction of a tensor. MPI adds in steps of its own choice, between which a half type may
// overflow: so a mean of half types is added in float32 and rounded once, at the end. The addends are scaled by a power
// of two first, which costs no bits, or the sum of bfloat16 might leave the range of float32.
class Reduced {
public:
    Reduced(const at::Tensor& tensor, Op op, int size)
        : tensor_(tensor),
          op_(op),
          size_(size),
          is_wide_(op == Op::kAvg && at::isReducedFloatingType(tensor.scalar_type())),
          whole_(is_wide_ ? at::empty(tensor.sizes(), tensor.options().dtype(at::kFloat)) : tensor),
          output_({whole_}) {}

    at::Tensor addend(const at::Tensor& given) const {
        return is_wide_ ? given.detach().to(at::kFloat).mul_(std::ldexp(1.0, -carried_exponent(size_))) : given;
    }
    const Flat& output() const { return output_; }
    DType type() const { return type_of(whole_); }
    std::size_t count() const { return static_cast<std::size_t>(tensor_.numel()); }
    void deliver() const {
        if (is_wide_)
            whole_.div_(std::ldexp(static_cast<double>(size_), -carried_exponent(size_)));
        else if (op_ == Op::kAvg)
            divide(type(), output_.data(), size_, count());
        output_.deliver();
        if (is_wide_) tensor_.copy_(whole_);
    }

private:
    const at::Tensor tensor_;
    const Op op_;
    const int size_;
    const bool is_wide_;
    const at::Tensor whole_;
    const Flat output_;
};

}  // namespace

MpiBackend::MpiBackend(std::shared_ptr<Group> group, Milliseconds timeout, std::size_t largest_count)
    : Backend(group->rank(), group->size()),
      group_(std::move(group)),
      options_(c10::make_intrusive<Options>("mpi", timeout)),
      largest_count_(largest_count),
      owner_(::getpid()) {
    init();
}

void MpiBackend::shutdown() {
    if (owner_ == ::getpid())
        group_->fail(std::make_exception_ptr(Error(c10::str("rank ", rank_, ": the group has been destroyed"))));
}

void MpiBackend::abort() {
    if (owner_ != ::getpid()) return;
    group_->fail(std::make_exception_ptr(Error(c10::str("rank ", rank_, ": the group has been aborted"))));
}

void MpiBackend::check_owner() const {
    TORCH_CHECK(owner_ == ::getpid(), "rank ", rank_,
                ": this process was forked from a rank and is none itself; use the group in process ", owner_);
}

int MpiBackend::root(const char* what, int64_t given) const {
    TORCH_CHECK_VALUE(given >= 0 && given < size_, what, ": root ", given, " is not in a group of ", size_, " ranks");
    return static_cast<int>(given);
}

WorkPtr MpiBackend::perform(MpiTask task, const MpiCallOptions& call_options, Tensors outputs) {
    std::vector<MpiTask> tasks;
    tasks.push_back(std::move(task));
    return perform(std::move(tasks), call_options, c10::str("call number ", sequence_ + 1), std::move(outputs));
}

WorkPtr MpiBackend::perform(std::vector<MpiTask> tasks, const MpiCallOptions& call_options, std::string what,
                            Tensors outputs) {
    check_owner();
    TORCH_CHECK_VALUE(!tasks.empty(), call_options.title, ": there is no tensor");
    const bool is_message = c10d::isP2POp(call_options.type);
    const std::uint64_t sequence = is_message ? ++messages_ : ++sequence_;
    auto work =
        c10::make_intrusive<MpiWork>(rank_, call_options.type, call_options.title, std::move(outputs), sequence);
    const auto all = std::make_shared<const std::vector<MpiTask>>(std::move(tasks));
    auto done = [all, like = AsCaller(), finish = work->finisher()](std::exception_ptr error) {
        const auto deliver = [&] {
            for (const MpiTask& task : *all) {
                if (task.deliver) task.deliver();
            }
        };
        if (!error) error = caught([&] { like.run(deliver); });
        return finish(error);
    };
    const auto operation =
        std::make_shared<Operation>(group_, std::string(call_options.title) + ", " + what, is_message,
                                    call_options.timeout, largest_count_, std::move(done));
    work->follow(operation);
    operation->begin(
        [&](Calls& calls) {
            for (const MpiTask& task : *all) task.begin(calls);
        },
        !call_options.async);
    if (!call_options.async) work->wait(kNoTimeout);
    return work;
}

MpiBackend::MpiTask MpiBackend::all_reduce_task(const at::Tensor& tensor, const c10d::ReduceOp& op) const {
    const Op kind = checked("all_reduce", op, tensor);
    const Reduced reduced(tensor, kind, size_);
    Flat input({reduced.addend(premultiplied("all_reduce", tensor, op))});
    input.fill(reduced.output(), reduced.output().data());
    return {[=](Calls& calls) {
                calls.all_reduce(kind, reduced.type(), input.data(), reduced.output().data(), reduced.count());
            },
            [=] { reduced.deliver(); }};
}

WorkPtr MpiBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
    return perform(all_reduce_task(only("all_reduce", tensors), opts.reduceOp),
                   call_options(OpType::ALLREDUCE, "mpi:all_reduce", opts), tensors);
}

WorkPtr MpiBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
    std::vector<MpiTask> tasks;
    for (const auto& tensor : tensors) tasks.push_back(all_reduce_task(only("all_reduce", {tensor}), opts.reduceOp));
    return perform(std::move(tasks), call_options(OpType::ALLREDUCE_COALESCED, "mpi:all_reduce", opts), "coalesced",
                   tensors);
}

WorkPtr MpiBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
    const auto& tensor = only("broadcast", tensors);
    const int from = root("broadcast", opts.rootRank);
    Flat flat({tensor});
    if (rank_ == from) flat.fill(flat, flat.data());
    MpiTask task{[=](Calls& calls) { calls.broadcast(flat.data(), flat.bytes()[0], from); }, {}};
    if (rank_ != from) task.deliver = [=] { flat.deliver(); };
    return perform(std::move(task), call_options(OpType::BROADCAST, "mpi:broadcast", opts), tensors);
}

WorkPtr MpiBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
    const auto& tensor = only("reduce", tensors);
    const int to = root("reduce", opts.rootRank);
    const Op kind = checked("reduce", opts.reduceOp, tensor);
    const Reduced reduced(tensor, kind, size_);
    Flat input({reduced.addend(premultiplied("reduce", tensor, opts.reduceOp))});
    input.fill(reduced.output(), reduced.output().data());
    MpiTask task{[=, is_root = rank_ == to](Calls& calls) {
                     calls.reduce(kind, reduced.type(), input.data(), reduced.output().data(), reduced.count(), to,
                                  is_root);
                 },
                 {}};
    if (rank_ == to) task.deliver = [=] { reduced.deliver(); };
    return perform(std::move(task), call_options(OpType::REDUCE, "mpi:reduce", opts), tensors);
}

MpiBackend::MpiTask MpiBackend::all_gather_task(const Tensors& given, const at::Tensor& tensor) const {
    as_many("all_gather", given.size(), size_);
    alike("all_gather", given, tensor);
    const auto own = given[static_cast<std::size_t>(rank_)].numel();
    TORCH_CHECK_VALUE(own == tensor.numel(), "all_gather: rank ", rank_, " gives ", tensor.numel(),
                      " elements and expects ", own, " from itself");
    const Flat output(given);
    Flat input({tensor});
    const Counts bytes = output.bytes();
    input.fill(output, output.data() + std::accumulate(bytes.begin(), bytes.begin() + rank_, std::size_t{0}));
    return {[=, rank = rank_](Calls& calls) { calls.all_gather(input.data(), output.data(), bytes, rank); },
            [=] { output.deliver(); }};
}

WorkPtr MpiBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
    return perform(all_gather_task(outputs.at(0), only("all_gather", inputs)),
                   call_options(OpType::ALLGATHER, "mpi:all_gather", opts), outputs[0]);
}

WorkPtr MpiBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

WorkPtr MpiBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& opts) {
    std::vector<MpiTask> tasks;
    for (std::size_t each = 0; each < inputs.size(); ++each) {
        Tensors places;
        for (const auto& of_rank : outputs) places.push_back(of_rank.at(each));
        tasks.push_back(all_gather_task(places, only("all_gather", {inputs[each]})));
    }
    return perform(std::move(tasks), call_options(OpType::ALLGATHER_COALESCED, "mpi:all_gather", opts), "coalesced",
                   inputs);
}

WorkPtr MpiBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& opts) {
    std::vector<MpiTask> tasks;
    for (std::size_t each = 0; each < inputs.size(); ++each) {
        const Output whole(only("all_gather", {outputs.at(each)}));
        MpiTask task = all_gather_task(blocks("all_gather", whole.flat, size_), only("all_gather", {inputs[each]}));
        task.deliver = [whole, deliver = std::move(task.deliver)] {
            deliver();
            whole.deliver();
        };
        tasks.push_back(std::move(task));
    }
    return perform(std::move(tasks), call_options(OpType::_ALLGATHER_BASE, "mpi:all_gather", opts), "into one tensor",
                   outputs);
}

WorkPtr MpiBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
    const auto& tensor = only("gather", inputs);
    const int to = root("gather", opts.rootRank);
    const Tensors given = rank_ == to ? outputs.at(0) : Tensors();
    if (rank_ == to)
        as_many("gather", given.size(), size_);
    else
        TORCH_CHECK_VALUE(outputs.empty() || outputs[0].empty(), "gather: rank ", rank_,
                          " is not the root and takes no list");
    alike("gather", given, tensor);
    const Flat output(given);
    Flat input({tensor});
    input.fill(output);
    MpiTask task{[=](Calls& calls) { calls.gather(input.data(), input.bytes()[0], output.data(), output.bytes(), to); },
                 [=] { output.deliver(); }};
    return perform(std::move(task), call_options(OpType::GATHER, "mpi:gather", opts), given);
}

WorkPtr MpiBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
    const auto& tensor = only("scatter", outputs);
    const int from = root("scatter", opts.rootRank);
    const Tensors given = rank_ == from ? inputs.at(0) : Tensors();
    if (rank_ == from)
        as_many("scatter", given.size(), size_);
    else
        TORCH_CHECK_VALUE(inputs.empty() || inputs[0].empty(), "scatter: rank ", rank_,
                          " is not the root and gives no list");
    alike("scatter", given, tensor);
    const Flat output({tensor});
    Flat input(given);
    input.fill(output);
    MpiTask task{
        [=](Calls& calls) { calls.scatter(input.data(), input.bytes(), output.data(), output.bytes()[0], from); },
        [=] { output.deliver(); }};
    return perform(std::move(task), call_options(OpType::SCATTER, "mpi:scatter", opts), outputs);
}

MpiBackend::MpiTask MpiBackend::reduce_scatter_task(const at::Tensor& tensor, const Tensors& given,
                                                    const c10d::ReduceOp& op) const {
    const Op kind = checked("reduce_scatter", op, tensor);
    as_many("reduce_scatter", given.size(), size_);
    alike("reduce_scatter", given, tensor);
    const auto own = given[static_cast<std::size_t>(rank_)].numel();
    TORCH_CHECK_VALUE(own == tensor.numel(), "reduce_scatter: rank ", rank_, " has ", own,
                      " elements for itself and room for ", tensor.numel());
    const Reduced reduced(tensor, kind, size_);
    Tensors inputs;
    for (const auto& each : given) inputs.push_back(reduced.addend(premultiplied("reduce_scatter", each, op)));
    Flat input(inputs);
    input.fill(reduced.output());
    return {[=, rank = rank_](Calls& calls) {
                calls.reduce_scatter(kind, reduced.type(), input.data(), reduced.output().data(), input.counts(), rank);
            },
            [=] { reduced.deliver(); }};
}

WorkPtr MpiBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                   const c10d::ReduceScatterOptions& opts) {
    return perform(reduce_scatter_task(only("reduce_scatter", outputs), inputs.at(0), opts.reduceOp),
                   call_options(OpType::REDUCE_SCATTER, "mpi:reduce_scatter", opts), outputs);
}

WorkPtr MpiBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::ReduceScatterOptions& opts) {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

WorkPtr MpiBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::ReduceScatterOptions& opts) {
    std::vector<MpiTask> tasks;
    for (std::size_t each = 0; each < inputs.size(); ++each) {
        tasks.push_back(reduce_scatter_task(only("reduce_scatter", {outputs.at(each)}),
                                            blocks("reduce_scatter", only("reduce_scatter", {inputs[each]}), size_),
                                            opts.reduceOp));
    }
    return perform(std::move(tasks), call_options(OpType::_REDUCE_SCATTER_BASE, "mpi:reduce_scatter", opts),
                   "from one tensor", outputs);
}

MpiBackend::MpiTask MpiBackend::all_to_all_task(const Tensors& outputs, const Tensors& inputs) const {
    as_many("all_to_all", outputs.size(), size_);
    as_many("all_to_all", inputs.size(), size_);
    alike("all_to_all", outputs, inputs[0]);
    alike("all_to_all", inputs, inputs[0]);
    const Flat output(outputs);
    Flat input(inputs);
    input.fill(output);
    return {[=](Calls& calls) { calls.all_to_all(input.data(), input.bytes(), output.data(), output.bytes()); },
            [=] { output.deliver(); }};
}

WorkPtr MpiBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                  std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
    const Output whole(only("all_to_all", {output}));
    MpiTask task = all_to_all_task(blocks("all_to_all", whole.flat, size_, output_splits),
                                   blocks("all_to_all", only("all_to_all", {input}), size_, input_splits));
    task.deliver = [whole, deliver = std::move(task.deliver)] {
        deliver();
        whole.deliver();
    };
    return perform(std::move(task), call_options(OpType::ALLTOALL_BASE, "mpi:all_to_all", opts), {output});
}

WorkPtr MpiBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
    return perform(all_to_all_task(outputs, inputs), call_options(OpType::ALLTOALL, "mpi:all_to_all", opts), outputs);
}

WorkPtr MpiBackend::barrier(const c10d::BarrierOptions& opts) {
    return perform(MpiTask{[](Calls& calls) { calls.barrier(); }, {}},
                   call_options(OpType::BARRIER, "mpi:barrier", opts), {});
}

void MpiBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool) {
    check_owner();
    if (const auto failure = group_->failure()) std::rethrow_exception(failure);
    const auto limit = call_options(OpType::BARRIER, "", opts).timeout;
    const std::vector<int> missing = group_->roll_call(limit, check_signals);
    if (missing.empty()) return;
    const auto error =
        std::make_exception_ptr(Error(c10::str("Rank ", rank_, " timed out in monitoredBarrier after ", limit.count(),
                                               " ms, no sign of rank ", c10::Join(", ", missing)),
                                      true));
    group_->fail(error);
    std::rethrow_exception(error);
}

WorkPtr MpiBackend::message(OpType type, const char* title, Tensors& tensors, int peer, int tag) {
    const auto& tensor = only(title, tensors);
    const bool is_outgoing = type == OpType::SEND, is_from_any = type == OpType::RECVANYSOURCE;
    TORCH_CHECK_VALUE(is_from_any || (peer >= 0 && peer < size_), title, ": rank ", peer, " is not in a group of ",
                      size_, " ranks");
    TORCH_CHECK_VALUE(tag >= 0 && tag <= group_->largest_tag(), title, ": tag ", tag, " is not from 0 to ",
                      group_->largest_tag(), ", what MPI can tell apart");
    if (!is_outgoing) must_be_distinct(title, tensor);
    Flat flat({tensor});
    if (is_outgoing) flat.fill(flat, flat.data());
    MpiTask task{[=](Calls& calls) {
                     if (is_outgoing)
                         calls.send(flat.data(), flat.bytes()[0], peer, tag);
                     else
                         calls.receive(flat.data(), flat.bytes()[0], peer, tag);
                 },
                 {}};
    if (!is_outgoing) task.deliver = [=] { flat.deliver(); };
    const std::string whom = is_from_any ? "any rank" : c10::str("rank ", peer);
    std::vector<MpiTask> tasks;
    tasks.push_back(std::move(task));
    return perform(std::move(tasks), MpiCallOptions{type, title, options_->timeout, true},
                   c10::str(is_outgoing ? "to " : "from ", whom, ", tag ", tag), tensors);
}

WorkPtr MpiBackend::send(Tensors& tensors, int to, int tag) {
    return message(OpType::SEND, "mpi:send", tensors, to, tag);
}

WorkPtr MpiBackend::recv(Tensors& tensors, int from, int tag) {
    return message(OpType::RECV, "mpi:recv", tensors, from, tag);
}

WorkPtr MpiBackend::recvAnysource(Tensors& tensors, int tag) {
    return message(OpType::RECVANYSOURCE, "mpi:recv", tensors, MPI_ANY_SOURCE, tag);
}

}  // namespace dist_prims::mpi
