// The common part of the backends of this library: c10d's interface, reduced to a task for each collective.
//
// c10d calls a collective through several functions: with lists of tensors, with one large tensor, coalesced. Here each
// of them checks its arguments and turns into tasks of nine kinds. A backend implements those nine, a function that
// performs tasks, and messages.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "../../common/process.h"
#include "../../common/thread.h"
#include "profiler_record.h"
#include "tensor_arguments.h"

namespace dist_prims {

using Milliseconds = std::chrono::milliseconds;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// The names of a backend's calls, in errors, profiles and the flight recorder.
struct Titles {
    std::array<const char*, 9> collectives;  // by Collective
    const char *send, *receive;
};

struct CallOptions {
    c10d::OpType type;
    const char* title;
    Milliseconds timeout;
    bool async;
};

// `Task`: a collective that is ready to run, and owns its memory.
template <typename Task>
class CollectiveBackend : public c10d::Backend {
public:
    const std::string getBackendName() const override { return options_->backend; }
    // A copy: ProcessGroup::splitGroup of torch 2.13 writes the options of the new group into it.
    c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<Options>(*options_); }
    void setTimeout(Milliseconds timeout) override { options_->timeout = timeout; }
    void setSequenceNumberForGroup() override {}
    uint64_t getSequenceNumberForGroup() override { return sequence_; }

    WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
        if (auto* backend = delegate(tensors)) return backend->allreduce(tensors, opts);
        const auto record = profiled("allreduce", opts.asyncOp, tensors, tensors);
        return start(checked_all_reduce(only("all_reduce", tensors), opts.reduceOp),
                     call_options(Collective::kAllReduce, opts), tensors);
    }
    WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
        if (auto* backend = delegate(tensors)) return backend->allreduce_coalesced(tensors, opts);
        const auto record = profiled("allreduce_coalesced", opts.asyncOp, tensors, tensors);
        std::vector<Task> tasks;
        for (const auto& tensor : tensors) tasks.push_back(checked_all_reduce(tensor, opts.reduceOp));
        return start(std::move(tasks), call_options(Collective::kAllReduce, opts, c10d::OpType::ALLREDUCE_COALESCED),
                     tensors);
    }
    WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
        if (auto* backend = delegate(tensors)) return backend->broadcast(tensors, opts);
        const auto record = profiled("broadcast", opts.asyncOp, tensors, tensors, opts.rootRank);
        return start(broadcast_task(only("broadcast", tensors), root("broadcast", opts.rootRank)),
                     call_options(Collective::kBroadcast, opts), tensors);
    }
    WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
        if (auto* backend = delegate(tensors)) return backend->reduce(tensors, opts);
        const auto record = profiled("reduce", opts.asyncOp, tensors, tensors, opts.rootRank);
        const auto& tensor = only("reduce", tensors);
        const int to = root("reduce", opts.rootRank);
        const Op kind = checked("reduce", opts.reduceOp, tensor);
        return start(reduce_task(premultiplied("reduce", tensor, opts.reduceOp), tensor, kind, to),
                     call_options(Collective::kReduce, opts), tensors);
    }
    WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
        if (auto* backend = delegate(inputs)) return backend->allgather(outputs, inputs, opts);
        const auto record = profiled("all_gather", opts.asyncOp, inputs, outputs);
        const auto& input = only("all_gather", inputs);
        return start(checked_all_gather(input, outputs.at(0)), call_options(Collective::kAllGather, opts),
                     outputs.at(0));
    }
    WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
        if (auto* backend = delegate({input})) return backend->_allgather_base(output, input, opts);
        const auto record = profiled("_allgather_base", opts.asyncOp, input, output);
        return start(checked_all_gather(input, blocks("all_gather", output, size_)),
                     call_options(Collective::kAllGather, opts, c10d::OpType::_ALLGATHER_BASE), {output});
    }
    WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& opts) override {
        if (auto* backend = delegate(inputs)) return backend->allgather_coalesced(outputs, inputs, opts);
        const auto record = profiled("allgather_coalesced", opts.asyncOp, inputs, outputs);
        std::vector<Task> tasks;
        for (std::size_t each = 0; each < inputs.size(); ++each) {
            Tensors places;
            for (const auto& of_rank : outputs) places.push_back(of_rank.at(each));
            tasks.push_back(checked_all_gather(inputs[each], places));
        }
        return start(std::move(tasks), call_options(Collective::kAllGather, opts, c10d::OpType::ALLGATHER_COALESCED),
                     inputs);
    }
    WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& opts) override {
        if (auto* backend = delegate(inputs)) return backend->allgather_into_tensor_coalesced(outputs, inputs, opts);
        const auto record = profiled("allgather_into_tensor_coalesced", opts.asyncOp, inputs, outputs);
        std::vector<Task> tasks;
        for (std::size_t each = 0; each < inputs.size(); ++each)
            tasks.push_back(checked_all_gather(inputs[each], blocks("all_gather", outputs.at(each), size_)));
        return start(std::move(tasks), call_options(Collective::kAllGather, opts, c10d::OpType::COALESCED), outputs);
    }
    WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
        if (auto* backend = delegate(inputs)) return backend->gather(outputs, inputs, opts);
        const auto record = profiled("gather", opts.asyncOp, inputs, outputs, opts.rootRank);
        const auto& input = only("gather", inputs);
        const int to = root("gather", opts.rootRank);
        const Tensors& list = list_of_root("gather", outputs, to, "takes");
        alike("gather", list, input);
        return start(gather_task(input, list, to), call_options(Collective::kGather, opts), list);
    }
    // gather into one tensor, which only the root's call uses. A virtual function of the base since torch 2.15.
    virtual WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) {
        Tensors inputs{input};
        std::vector<Tensors> outputs;
        if (rank_ == opts.rootRank) outputs.push_back(blocks("gather", output, size_));
        return gather(outputs, inputs, opts);
    }
    WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
        if (auto* backend = delegate(outputs)) return backend->scatter(outputs, inputs, opts);
        const auto record = profiled("scatter", opts.asyncOp, inputs, outputs, opts.rootRank);
        const auto& output = only("scatter", outputs);
        const int from = root("scatter", opts.rootRank);
        const Tensors& list = list_of_root("scatter", inputs, from, "gives");
        alike("scatter", list, output);
        return start(scatter_task(list, output, from), call_options(Collective::kScatter, opts), outputs);
    }
    WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                           const c10d::ReduceScatterOptions& opts) override {
        if (auto* backend = delegate(outputs)) return backend->reduce_scatter(outputs, inputs, opts);
        const auto record = profiled("reduce_scatter", opts.asyncOp, inputs, outputs);
        return start(checked_reduce_scatter(inputs.at(0), only("reduce_scatter", outputs), opts.reduceOp),
                     call_options(Collective::kReduceScatter, opts), outputs);
    }
    WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::ReduceScatterOptions& opts) override {
        if (auto* backend = delegate({input})) return backend->_reduce_scatter_base(output, input, opts);
        const auto record = profiled("_reduce_scatter_base", opts.asyncOp, input, output);
        return start(checked_reduce_scatter(blocks("reduce_scatter", packed(input), size_), output, opts.reduceOp),
                     call_options(Collective::kReduceScatter, opts, c10d::OpType::_REDUCE_SCATTER_BASE), {output});
    }
    WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::ReduceScatterOptions& opts) override {
        if (auto* backend = delegate(inputs)) return backend->reduce_scatter_tensor_coalesced(outputs, inputs, opts);
        const auto record = profiled("reduce_scatter_tensor_coalesced", opts.asyncOp, inputs, outputs);
        std::vector<Task> tasks;
        for (std::size_t each = 0; each < inputs.size(); ++each)
            tasks.push_back(checked_reduce_scatter(blocks("reduce_scatter", packed(inputs[each]), size_),
                                                   outputs.at(each), opts.reduceOp));
        return start(std::move(tasks), call_options(Collective::kReduceScatter, opts, c10d::OpType::COALESCED),
                     outputs);
    }
    WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                          std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override {
        if (auto* backend = delegate({input}))
            return backend->alltoall_base(output, input, output_splits, input_splits, opts);
        const bool is_even = input_splits.empty() && output_splits.empty();
        const auto record = profiled(is_even ? "all_to_all" : "all_to_allv", opts.asyncOp, input, output, -1,
                                     input_splits, output_splits);
        return start(checked_all_to_all(blocks("all_to_all", packed(input), size_, input_splits),
                                        blocks("all_to_all", output, size_, output_splits)),
                     call_options(Collective::kAllToAll, opts, c10d::OpType::ALLTOALL_BASE), {output});
    }
    WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
        if (auto* backend = delegate(inputs)) return backend->alltoall(outputs, inputs, opts);
        const auto record = profiled("all_to_all", opts.asyncOp, inputs, outputs);
        return start(checked_all_to_all(inputs, outputs), call_options(Collective::kAllToAll, opts), outputs);
    }
    WorkPtr barrier(const c10d::BarrierOptions& opts) override {
        const auto record = profiled("barrier", opts.asyncOp, Tensors(), Tensors());
        return start(barrier_task(), call_options(Collective::kBarrier, opts), {});
    }
    void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
        check_owner();
        monitored_barrier(call_options(Collective::kBarrier, opts).timeout, wait_all_ranks);
    }
    WorkPtr send(Tensors& tensors, int to, int tag) override {
        const auto record = profiled_message("send", tensors, to);
        if (auto* backend = message_delegate(tensors, tag)) return backend->send(tensors, to, tag);
        return checked_message(c10d::OpType::SEND, titles_.send, tensors, to, tag);
    }
    WorkPtr recv(Tensors& tensors, int from, int tag) override {
        const auto record = profiled_message("recv", tensors, from);
        if (auto* backend = message_delegate(tensors, tag)) return backend->recv(tensors, from, tag);
        return checked_message(c10d::OpType::RECV, titles_.receive, tensors, from, tag);
    }
    WorkPtr recvAnysource(Tensors& tensors, int tag) override {
        const auto record = profiled_message("recv", tensors, -1);
        if (auto* backend = message_delegate(tensors, tag)) return backend->recvAnysource(tensors, tag);
        return checked_message(c10d::OpType::RECVANYSOURCE, titles_.receive, tensors, -1, tag);
    }

protected:
    CollectiveBackend(const char* name, const Titles& titles, int rank, int size, Milliseconds timeout)
        : Backend(rank, size), titles_(titles), options_(c10::make_intrusive<Options>(name, timeout)) {
        init();
    }

    // The arguments of a task are checked; inputs and outputs may have any layout.
    virtual Task all_reduce_task(const at::Tensor& input, const at::Tensor& output, Op op) = 0;
    virtual Task broadcast_task(const at::Tensor& tensor, int root) = 0;
    virtual Task reduce_task(const at::Tensor& input, const at::Tensor& output, Op op, int root) = 0;
    virtual Task all_gather_task(const at::Tensor& input, const Tensors& outputs) = 0;
    virtual Task reduce_scatter_task(const Tensors& inputs, const at::Tensor& output, Op op) = 0;
    virtual Task all_to_all_task(const Tensors& inputs, const Tensors& outputs) = 0;
    virtual Task gather_task(const at::Tensor& input, const Tensors& outputs, int root) = 0;
    virtual Task scatter_task(const Tensors& inputs, const at::Tensor& output, int root) = 0;
    virtual Task barrier_task() = 0;
    virtual WorkPtr perform(std::vector<Task> tasks, const CallOptions& options, Tensors outputs) = 0;
    // A message of one tensor: a send, a receive, or a receive from any rank (`peer` is -1).
    virtual WorkPtr message(const CallOptions& options, const Tensors& tensor, int peer, int tag) = 0;
    virtual void monitored_barrier(Milliseconds limit, bool wait_all_ranks) = 0;
    // The other backend that serves these tensors; null: this one does.
    virtual c10d::Backend* delegate(const Tensors&) { return nullptr; }
    virtual c10d::Backend* message_delegate(const Tensors&, int /*tag*/) { return nullptr; }

    void check_owner() const {
        TORCH_CHECK(owner_ == this_process(), "rank ", rank_, ": this process was forked from a rank and is none ",
                    "itself; use the group in process ", owner_, ", or start ranks with dist_prims.spawn");
        TORCH_CHECK(!awaits_members_, "rank ", rank_, ": the group was made with enable_reconfigure=True and has no ",
                    "members yet; call reconfigure first");
    }
    const char* title(Collective collective) const { return titles_.collectives[static_cast<std::size_t>(collective)]; }
    CallOptions call_options(Collective collective, bool async) const {
        using c10d::OpType;
        constexpr std::array kTypes{OpType::ALLREDUCE, OpType::REDUCE_SCATTER, OpType::ALLGATHER,
                                    OpType::BROADCAST, OpType::REDUCE,         OpType::GATHER,
                                    OpType::SCATTER,   OpType::ALLTOALL,       OpType::BARRIER};
        return {kTypes[static_cast<std::size_t>(collective)], title(collective), options_->timeout, async};
    }
    // The event of a collective, for profilers. An input or output is a tensor, a list of tensors, or a list of lists.
    template <typename In, typename Out>
    ProfilerRecord profiled(const char* name, bool async, const In& inputs, const Out& outputs, int64_t root = -1,
                            const std::vector<int64_t>& input_splits = {},
                            const std::vector<int64_t>& output_splits = {}) const {
        return ProfilerRecord([&] {
            ProfiledCall call = profiled_call(name, inputs, outputs, root);
            call.is_async = async;
            call.sequence = sequence_ + 1;
            call.input_splits = input_splits;
            call.output_splits = output_splits;
            return call;
        });
    }
    ProfilerRecord profiled_message(const char* name, const Tensors& tensors, int peer) const {
        return ProfilerRecord([&] {
            ProfiledCall call = profiled_call(name, tensors, tensors, peer);
            call.is_async = call.is_message = true;
            call.sequence = messages_ + 1;
            return call;
        });
    }
    // Performs tasks after the checks that all calls have in common.
    WorkPtr start(std::vector<Task> tasks, const CallOptions& options, Tensors outputs) {
        check_owner();
        TORCH_CHECK_VALUE(!tasks.empty(), options.title, ": there is no tensor");
        return perform(std::move(tasks), options, std::move(outputs));
    }
    WorkPtr start(Task task, const CallOptions& options, Tensors outputs) {
        std::vector<Task> tasks;
        tasks.push_back(std::move(task));
        return start(std::move(tasks), options, std::move(outputs));
    }

    const Titles& titles_;
    const c10::intrusive_ptr<Options> options_;
    const int owner_ = this_process();
    bool awaits_members_ = false;  // until the first reconfigure
    std::atomic<std::uint64_t> sequence_{0}, messages_{0};

private:
    template <typename In, typename Out>
    ProfiledCall profiled_call(const char* name, const In& inputs, const Out& outputs, int64_t peer) const {
        ProfiledCall call{.name = name,
                          .is_async = false,
                          .is_message = false,
                          .sequence = 0,
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
        append(call.inputs, inputs);
        append(call.outputs, outputs);
        return call;
    }
    template <typename Opts>
    CallOptions call_options(Collective collective, const Opts& opts) const {
        CallOptions options = call_options(collective, opts.asyncOp);
        if (opts.timeout != c10d::kUnsetTimeout) options.timeout = opts.timeout;
        return options;
    }
    template <typename Opts>
    CallOptions call_options(Collective collective, const Opts& opts, c10d::OpType type) const {
        CallOptions options = call_options(collective, opts);
        options.type = type;
        return options;
    }
    int root(const char* what, int64_t given) const {
        TORCH_CHECK_VALUE(given >= 0 && given < size_, what, ": root ", given, " is not in a group of ", size_,
                          " ranks");
        return static_cast<int>(given);
    }
    // The list of the root's, empty on other ranks.
    const Tensors& list_of_root(const char* what, const std::vector<Tensors>& lists, int root, const char* verb) const {
        static const Tensors none;
        if (rank_ == root) {
            as_many(what, lists.at(0).size(), size_);
            return lists[0];
        }
        TORCH_CHECK_VALUE(lists.empty() || lists[0].empty(), what, ": rank ", rank_, " is not the root and ", verb,
                          " no list");
        return none;
    }

    Task checked_all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op) {
        must_be_on_cpu("all_reduce", tensor);
        const Op kind = checked("all_reduce", op, tensor);
        return all_reduce_task(premultiplied("all_reduce", tensor, op), tensor, kind);
    }
    Task checked_all_gather(const at::Tensor& input, const Tensors& outputs) {
        must_be_on_cpu("all_gather", input);
        as_many("all_gather", outputs.size(), size_);
        alike("all_gather", outputs, input);
        const auto own = outputs[static_cast<std::size_t>(rank_)].numel();
        TORCH_CHECK_VALUE(own == input.numel(), "all_gather: rank ", rank_, " gives ", input.numel(),
                          " elements and expects ", own, " from itself");
        return all_gather_task(input, outputs);
    }
    Task checked_reduce_scatter(const Tensors& inputs, const at::Tensor& output, const c10d::ReduceOp& op) {
        must_be_on_cpu("reduce_scatter", output);
        const Op kind = checked("reduce_scatter", op, output);
        as_many("reduce_scatter", inputs.size(), size_);
        alike("reduce_scatter", inputs, output);
        const auto own = inputs[static_cast<std::size_t>(rank_)].numel();
        TORCH_CHECK_VALUE(own == output.numel(), "reduce_scatter: rank ", rank_, " has room for ", output.numel(),
                          " elements and gives ", own, " to itself");
        Tensors addends;
        for (const auto& each : inputs) addends.push_back(premultiplied("reduce_scatter", each, op));
        return reduce_scatter_task(addends, output, kind);
    }
    Task checked_all_to_all(const Tensors& inputs, const Tensors& outputs) {
        as_many("all_to_all", outputs.size(), size_);
        as_many("all_to_all", inputs.size(), size_);
        must_be_on_cpu("all_to_all", inputs[0]);
        alike("all_to_all", outputs, inputs[0]);
        alike("all_to_all", inputs, inputs[0]);
        return all_to_all_task(inputs, outputs);
    }
    WorkPtr checked_message(c10d::OpType type, const char* title, const Tensors& tensors, int peer, int tag) {
        check_owner();
        const auto& tensor = only(title, tensors);
        TORCH_CHECK_VALUE(type == c10d::OpType::RECVANYSOURCE || (peer >= 0 && peer < size_), title, ": rank ", peer,
                          " is not in a group of ", size_, " ranks");
        if (type != c10d::OpType::SEND) must_be_distinct(title, tensor);
        return message({type, title, options_->timeout, true}, tensors, peer, tag);
    }
};

}  // namespace dist_prims
