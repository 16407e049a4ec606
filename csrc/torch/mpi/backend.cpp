#include "backend.h"

#include <cmath>
#include <numeric>

#include "../../common/kernels.h"
#include "../../common/thread.h"
#include "../../net/tags.h"
#include "flat.h"
#include "work.h"

namespace dist_prims::mpi {
namespace {

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

constexpr Titles kTitles{{"mpi:all_reduce", "mpi:reduce_scatter", "mpi:all_gather", "mpi:broadcast", "mpi:reduce",
                          "mpi:gather", "mpi:scatter", "mpi:all_to_all", "mpi:barrier"},
                         "mpi:send",
                         "mpi:recv"};

}  // namespace

MpiBackend::MpiBackend(std::shared_ptr<Group> group, Milliseconds timeout, std::size_t largest_count)
    : CollectiveBackend("mpi", kTitles, group->rank(), group->size(), timeout),
      group_(std::move(group)),
      largest_count_(largest_count) {}

void MpiBackend::shutdown() {
    if (owner_ == this_process())
        group_->fail(std::make_exception_ptr(Error(c10::str("rank ", rank_, ": the group has been destroyed"))));
}

void MpiBackend::abort() {
    if (owner_ != this_process()) return;
    group_->fail(std::make_exception_ptr(Error(c10::str("rank ", rank_, ": the group has been aborted"))));
}

WorkPtr MpiBackend::perform(std::vector<MpiTask> tasks, const CallOptions& options, Tensors outputs) {
    return begin(std::move(tasks), options, c10::str("call number ", sequence_ + 1), std::move(outputs));
}

WorkPtr MpiBackend::begin(std::vector<MpiTask> tasks, const CallOptions& options, const std::string& what,
                          Tensors outputs) {
    const bool is_message = c10d::isP2POp(options.type);
    const std::uint64_t sequence = is_message ? ++messages_ : ++sequence_;
    auto work = c10::make_intrusive<MpiWork>(rank_, options.type, options.title, std::move(outputs), sequence);
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
    const auto operation = group_->operation(
        {std::string(options.title) + ", " + what, is_message, options.timeout, largest_count_}, std::move(done));
    work->follow(operation);
    operation->begin(
        [&](Calls& calls) {
            for (const MpiTask& task : *all) task.begin(calls);
        },
        !options.async);
    if (!options.async) work->wait(kNoTimeout);
    return work;
}

MpiTask MpiBackend::all_reduce_task(const at::Tensor& tensor, const at::Tensor& output, Op op) {
    const Reduced reduced(output, op, size_);
    Flat input({reduced.addend(tensor)});
    input.fill(reduced.output(), reduced.output().data());
    return {[=](Calls& calls) {
                calls.all_reduce(op, reduced.type(), input.data(), reduced.output().data(), reduced.count());
            },
            [=] { reduced.deliver(); }};
}

MpiTask MpiBackend::broadcast_task(const at::Tensor& tensor, int root) {
    Flat flat({tensor});
    if (rank_ == root) flat.fill(flat, flat.data());
    MpiTask task{[=](Calls& calls) { calls.broadcast(flat.data(), flat.bytes()[0], root); }};
    if (rank_ != root) task.deliver = [=] { flat.deliver(); };
    return task;
}

MpiTask MpiBackend::reduce_task(const at::Tensor& tensor, const at::Tensor& output, Op op, int root) {
    const Reduced reduced(output, op, size_);
    Flat input({reduced.addend(tensor)});
    input.fill(reduced.output(), reduced.output().data());
    MpiTask task{[=, is_root = rank_ == root](Calls& calls) {
        calls.reduce(op, reduced.type(), input.data(), reduced.output().data(), reduced.count(), root, is_root);
    }};
    if (rank_ == root) task.deliver = [=] { reduced.deliver(); };
    return task;
}

MpiTask MpiBackend::all_gather_task(const at::Tensor& tensor, const Tensors& outputs) {
    const Flat output(outputs);
    Flat input({tensor});
    const Counts bytes = output.bytes();
    input.fill(output, output.data() + std::accumulate(bytes.begin(), bytes.begin() + rank_, std::size_t{0}));
    return {[=, rank = rank_](Calls& calls) { calls.all_gather(input.data(), output.data(), bytes, rank); },
            [=] { output.deliver(); }};
}

MpiTask MpiBackend::reduce_scatter_task(const Tensors& tensors, const at::Tensor& output, Op op) {
    const Reduced reduced(output, op, size_);
    Tensors addends;
    for (const auto& each : tensors) addends.push_back(reduced.addend(each));
    Flat input(addends);
    input.fill(reduced.output());
    return {[=, rank = rank_](Calls& calls) {
                calls.reduce_scatter(op, reduced.type(), input.data(), reduced.output().data(), input.counts(), rank);
            },
            [=] { reduced.deliver(); }};
}

MpiTask MpiBackend::all_to_all_task(const Tensors& inputs, const Tensors& outputs) {
    const Flat output(outputs);
    Flat input(inputs);
    input.fill(output);
    return {[=](Calls& calls) { calls.all_to_all(input.data(), input.bytes(), output.data(), output.bytes()); },
            [=] { output.deliver(); }};
}

MpiTask MpiBackend::gather_task(const at::Tensor& tensor, const Tensors& outputs, int root) {
    const Flat output(outputs);
    Flat input({tensor});
    input.fill(output);
    return {[=](Calls& calls) { calls.gather(input.data(), input.bytes()[0], output.data(), output.bytes(), root); },
            [=] { output.deliver(); }};
}

MpiTask MpiBackend::scatter_task(const Tensors& inputs, const at::Tensor& tensor, int root) {
    const Flat output({tensor});
    Flat input(inputs);
    input.fill(output);
    return {[=](Calls& calls) { calls.scatter(input.data(), input.bytes(), output.data(), output.bytes()[0], root); },
            [=] { output.deliver(); }};
}

MpiTask MpiBackend::barrier_task() {
    return {[](Calls& calls) { calls.barrier(); }};
}

void MpiBackend::monitored_barrier(Milliseconds limit, bool) {
    if (const auto failure = group_->failure()) std::rethrow_exception(failure);
    const std::vector<int> missing = group_->roll_call(limit, check_signals);
    if (missing.empty()) return;
    const auto error =
        std::make_exception_ptr(Error(c10::str("Rank ", rank_, " timed out in monitoredBarrier after ", limit.count(),
                                               " ms, no sign of rank ", c10::Join(", ", missing)),
                                      true));
    group_->fail(error);
    std::rethrow_exception(error);
}

WorkPtr MpiBackend::message(const CallOptions& options, const Tensors& tensor, int peer, int tag) {
    const bool is_outgoing = options.type == c10d::OpType::SEND, is_from_any = peer < 0;
    TORCH_CHECK_VALUE(tag >= 0 && tag <= group_->largest_tag(), options.title, ": tag ", tag, " is not from 0 to ",
                      group_->largest_tag(), ", what MPI can tell apart");
    Flat flat(tensor);
    std::vector<MpiTask> tasks(1);
    if (is_outgoing) {
        flat.fill(flat, flat.data());
        tasks[0].begin = [=](Calls& calls) { calls.send(flat.data(), flat.bytes()[0], peer, tag); };
    } else {
        // A group that spans hosts sends its own messages under the largest tags; see Transport.
        const bool may_be_shorter = Tags(group_->largest_tag()).is_agreement(tag);
        tasks[0].begin = [=, from = is_from_any ? Calls::kAnyRank : peer](Calls& calls) {
            calls.receive(flat.data(), flat.bytes()[0], from, tag, may_be_shorter);
        };
        tasks[0].deliver = [=] { flat.deliver(); };
    }
    const std::string peer_text = is_from_any ? "any rank" : c10::str("rank ", peer);
    return begin(std::move(tasks), options, c10::str(is_outgoing ? "to " : "from ", peer_text, ", tag ", tag), tensor);
}

}  // namespace dist_prims::mpi

template class dist_prims::CollectiveBackend<dist_prims::mpi::MpiTask>;
