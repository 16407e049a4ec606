#include "backend.h"

#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "tensors.h"
#include "work.h"

namespace dist_prims {
namespace {

using c10d::OpType;

Counts lengths(const Tensors& tensors) {
    Counts found;
    for (const auto& tensor : tensors) found.push_back(static_cast<std::size_t>(tensor.nbytes()));
    return found;
}

Counts elements(const Tensors& tensors) {
    Counts found;
    for (const auto& tensor : tensors) found.push_back(static_cast<std::size_t>(tensor.numel()));
    return found;
}

Blocks blocks_of(const Tensors& tensors) {
    Blocks found;
    for (const auto& tensor : tensors) found.push_back(bytes_of(tensor));
    return found;
}

Places places_of(const Tensors& tensors) {
    Places found;
    for (const auto& tensor : tensors) found.push_back(bytes_of(tensor));
    return found;
}

// Outputs whose memory can be written as it lies, and how the others get what was written for them.
struct Outputs {
    Tensors flat;
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;

    explicit Outputs(const Tensors& tensors) {
        for (const auto& tensor : tensors) {
            flat.push_back(packed(tensor));
            if (!flat.back().is_same(tensor)) copies.emplace_back(tensor, flat.back());
        }
    }
    void deliver() const {
        for (const auto& [tensor, written] : copies) tensor.copy_(written);
    }
};

Call call_of(Collective collective, const at::Tensor& like, std::size_t count) {
    Call call;
    call.collective = collective;
    call.dtype = type_of(like);
    call.count = count;
    return call;
}

at::Tensor premultiplied(const at::Tensor& tensor, const c10d::ReduceOp& op) {
    if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return tensor;
    const auto* factor = dynamic_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
    TORCH_CHECK(factor, "PREMUL_SUM without its factor");
    return factor->tensor_factor.defined() ? tensor * factor->tensor_factor : tensor * factor->double_factor;
}

Op checked(const char* what, const c10d::ReduceOp& op, const at::Tensor& tensor) {
    std::string reason;
    TORCH_CHECK_VALUE(op_of(op) != Op::kNone, what, ": this reduction is not known");
    TORCH_CHECK_VALUE(reduces(op_of(op), type_of(tensor), &reason), what, ": ", reason);
    return op_of(op);
}

const at::Tensor& only(const char* what, const Tensors& tensors) {
    TORCH_CHECK_VALUE(tensors.size() == 1, what, ": one tensor is needed, not ", tensors.size());
    TORCH_CHECK_VALUE(tensors[0].device().is_cpu(), what, ": the tensor is on ", tensors[0].device(),
                      ", not on the CPU");
    return tensors[0];
}

void alike(const char* what, const Tensors& tensors, const at::Tensor& like) {
    for (const auto& tensor : tensors) {
        TORCH_CHECK_VALUE(tensor.scalar_type() == like.scalar_type() && tensor.device() == like.device(), what,
                          ": tensors differ: ", tensor.scalar_type(), " on ", tensor.device(), ", ", like.scalar_type(),
                          " on ", like.device());
    }
}

void as_many(const char* what, std::size_t found, int wanted) {
    TORCH_CHECK_VALUE(found == static_cast<std::size_t>(wanted), what, ": ", found, " tensors for a group of ", wanted,
                      " ranks");
}

}  // namespace

PrimsBackend::PrimsBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Milliseconds timeout,
                           c10::intrusive_ptr<c10d::Backend> engine, bool one_host, std::size_t slot_bytes)
    : Backend(rank, size),
      engine_(std::move(engine)),
      options_(c10::make_intrusive<Options>("dist_prims", timeout)),
      owner_(::getpid()),
      queue_(std::make_shared<Queue>()) {
    init();
    if (!one_host) return;
    const auto deadline = Clock::now() + timeout;
    const std::string key = "shared memory";
    const auto tell = [&](const std::string& word) { store->set(key, word); };
    const auto ask = [&] { return store->check({key}) ? store->get_to_str(key) : std::string(); };
    const std::size_t bytes = Board::bytes(size, slot_bytes);
    const Descriptor memory = rank == 0 ? host_memory(bytes, size, tell, deadline) : fetch_memory(rank, ask, deadline);
    board_ = std::make_unique<Board>(std::make_shared<Mapping>(memory), rank, size, slot_bytes);
    board_->on_wait(check_signals);
    board_->open(Call{}, timeout);
    dist_prims::barrier(*board_);
    board_->watch_peers();
}

PrimsBackend::~PrimsBackend() {
    if (owner_ == ::getpid()) {
        shutdown();
        return;
    }
    // In a forked child there is no thread to join and no mapping to write to: let go of them without ending them.
    static_cast<void>(board_.release());
    static_cast<void>(new std::shared_ptr<Queue>(std::move(queue_)));
    static_cast<void>(engine_.release());
}

void PrimsBackend::setTimeout(Milliseconds timeout) {
    options_->timeout = timeout;
    if (engine_) engine_->setTimeout(timeout);
}

void PrimsBackend::shutdown() {
    if (owner_ != ::getpid()) return;  // a forked child has nothing to end
    const bool held = Py_IsInitialized() && PyGILState_Check();
    std::optional<pybind11::gil_scoped_release> release;
    if (held) release.emplace();  // work that is waited for may need it
    if (board_) board_->leave();
    queue_->close(std::make_exception_ptr(std::runtime_error("the group was destroyed before this collective began")),
                  [this] {
                      if (board_) board_->stop();
                  });
}

template <typename Opts>
PrimsBackend::How PrimsBackend::how(OpType type, const char* title, const Opts& opts) const {
    const bool unset = opts.timeout == c10d::kUnsetTimeout;
    return {type, title, unset ? options_->timeout : opts.timeout, opts.asyncOp};
}

WorkPtr PrimsBackend::perform(std::vector<Task> tasks, const How& how, Tensors outputs) {
    TORCH_CHECK(owner_ == ::getpid(), "rank ", rank_,
                ": this process was forked from a rank and is none itself; use the "
                "group in process ",
                owner_, ", or start ranks with dist_prims.spawn");
    for (Task& task : tasks) task.call.sequence = sequence_++;
    auto work = c10::make_intrusive<PrimsWork>(rank_, how.type, how.title, std::move(outputs), sequence_, queue_);
    auto job = work->job([this, tasks = std::move(tasks), timeout = how.timeout]() mutable { run(tasks, timeout); });
    if (how.async)
        queue_->submit(std::move(job));
    else
        queue_->run(job, check_signals);
    if (!how.async && work->exception()) std::rethrow_exception(work->exception());
    return work;
}

void PrimsBackend::run(std::vector<Task>& tasks, Milliseconds timeout) {
    const at::NoGradGuard no_grad;
    for (Task& task : tasks) {
        board_->open(task.call, timeout);
        task.run(*board_);
    }
}

PrimsBackend::Task PrimsBackend::all_reduce_task(const at::Tensor& tensor, const c10d::ReduceOp& op) const {
    const Op kind = checked("all_reduce", op, tensor);
    const at::Tensor input = packed(premultiplied(tensor, op));
    const Outputs outputs({tensor});
    const std::size_t count = static_cast<std::size_t>(tensor.numel());
    Task task{call_of(Collective::kAllReduce, tensor, count), {}};
    task.call.op = kind;
    task.run = [=, dtype = task.call.dtype](Board& board) {
        all_reduce(board, dtype, kind, bytes_of(input), bytes_of(outputs.flat[0]), count);
        outputs.deliver();
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
    task.run = [=](Board& board) {
        all_gather(board, bytes_of(input), places_of(outputs.flat), bytes);
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
    const Outputs outputs({tensor});
    const Counts counts = elements(given);
    Task task{
        call_of(Collective::kReduceScatter, tensor, std::accumulate(counts.begin(), counts.end(), std::size_t{0})), {}};
    task.call.op = kind;
    task.call.layout = checksum(given);
    task.run = [=, dtype = task.call.dtype](Board& board) {
        dist_prims::reduce_scatter(board, dtype, kind, blocks_of(inputs), bytes_of(outputs.flat[0]), counts);
        outputs.deliver();
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
    task.run = [=](Board& board) {
        all_to_all(board, blocks_of(inputs), outgoing, places_of(outputs.flat), incoming);
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

WorkPtr PrimsBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
    if (!native() || !tensors.at(0).is_cpu()) return engine_->allreduce(tensors, opts);
    if (tensors[0].layout() != at::kStrided) return engine_->allreduce(tensors, opts);
    const auto& tensor = only("all_reduce", tensors);
    return perform({all_reduce_task(tensor, opts.reduceOp)}, how(OpType::ALLREDUCE, "dist_prims:all_reduce", opts),
                   tensors);
}

WorkPtr PrimsBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
    return engine_->allreduce(tensors, opts);
}

WorkPtr PrimsBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
    if (!native()) return engine_->allreduce_coalesced(tensors, opts);
    std::vector<Task> tasks;
    for (const auto& tensor : tensors) tasks.push_back(all_reduce_task(tensor, opts.reduceOp));
    return perform(std::move(tasks), how(OpType::ALLREDUCE_COALESCED, "dist_prims:all_reduce", opts), tensors);
}

WorkPtr PrimsBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
    if (!native()) return engine_->broadcast(tensors, opts);
    const auto& tensor = only("broadcast", tensors);
    const int from = root("broadcast", opts.rootRank);
    const Outputs outputs({tensor});
    Task task{call_of(Collective::kBroadcast, tensor, static_cast<std::size_t>(tensor.numel())), {}};
    task.call.root = from;
    task.run = [=, bytes = static_cast<std::size_t>(tensor.nbytes())](Board& board) {
        dist_prims::broadcast(board, bytes, from, bytes_of(outputs.flat[0]));
        if (board.rank() != from) outputs.deliver();
    };
    return perform({std::move(task)}, how(OpType::BROADCAST, "dist_prims:broadcast", opts), tensors);
}

WorkPtr PrimsBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
    if (!native()) return engine_->reduce(tensors, opts);
    const auto& tensor = only("reduce", tensors);
    const int to = root("reduce", opts.rootRank);
    const Op kind = checked("reduce", opts.reduceOp, tensor);
    const at::Tensor input = packed(premultiplied(tensor, opts.reduceOp));
    const Outputs outputs({tensor});
    const std::size_t count = static_cast<std::size_t>(tensor.numel());
    Task task{call_of(Collective::kReduce, tensor, count), {}};
    task.call.op = kind;
    task.call.root = to;
    task.run = [=, dtype = task.call.dtype](Board& board) {
        dist_prims::reduce(board, dtype, kind, to, bytes_of(input), bytes_of(outputs.flat[0]), count);
        if (board.rank() == to) outputs.deliver();
    };
    return perform({std::move(task)}, how(OpType::REDUCE, "dist_prims:reduce", opts), tensors);
}

WorkPtr PrimsBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
    if (!native()) return engine_->allgather(outputs, inputs, opts);
    const auto& input = only("all_gather", inputs);
    return perform({all_gather_task(outputs.at(0), input)}, how(OpType::ALLGATHER, "dist_prims:all_gather", opts),
                   outputs[0]);
}

WorkPtr PrimsBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
    if (!native()) return engine_->_allgather_base(output, input, opts);
    return perform({all_gather_task(blocks(output, {}, "all_gather"), input)},
                   how(OpType::_ALLGATHER_BASE, "dist_prims:all_gather", opts), {output});
}

WorkPtr PrimsBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) {
    if (!native()) return engine_->allgather_coalesced(outputs, inputs, opts);
    std::vector<Task> tasks;
    for (std::size_t each = 0; each < inputs.size(); ++each) {
        Tensors places;
        for (const auto& of_rank : outputs) places.push_back(of_rank.at(each));
        tasks.push_back(all_gather_task(places, inputs[each]));
    }
    return perform(std::move(tasks), how(OpType::ALLGATHER_COALESCED, "dist_prims:all_gather", opts), inputs);
}

WorkPtr PrimsBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& opts) {
    if (!native()) return engine_->allgather_into_tensor_coalesced(outputs, inputs, opts);
    std::vector<Task> tasks;
    for (std::size_t each = 0; each < inputs.size(); ++each) {
        tasks.push_back(all_gather_task(blocks(outputs.at(each), {}, "all_gather"), inputs[each]));
    }
    return perform(std::move(tasks), how(OpType::COALESCED, "dist_prims:all_gather", opts), outputs);
}

WorkPtr PrimsBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
    if (!native()) return engine_->gather(outputs, inputs, opts);
    const at::Tensor input = packed(only("gather", inputs));
    const int to = root("gather", opts.rootRank);
    const Tensors given = rank_ == to ? outputs.at(0) : Tensors();
    if (rank_ == to)
        as_many("gather", given.size(), size_);
    else
        TORCH_CHECK_VALUE(outputs.empty() || outputs[0].empty(), "gather: rank ", rank_,
                          " is not the root and takes no list");
    alike("gather", given, input);
    const Outputs places(given);
    Task task{call_of(Collective::kGather, input, 0), {}};
    task.call.root = to;
    task.call.longest = static_cast<std::uint64_t>(input.nbytes());
    task.run = [=](Board& board) {
        dist_prims::gather(board, to, bytes_of(input), static_cast<std::size_t>(input.nbytes()), places_of(places.flat),
                           lengths(given));
        places.deliver();
    };
    return perform({std::move(task)}, how(OpType::GATHER, "dist_prims:gather", opts), given);
}

WorkPtr PrimsBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
    if (!native()) return engine_->scatter(outputs, inputs, opts);
    const auto& output = only("scatter", outputs);
    const int from = root("scatter", opts.rootRank);
    Tensors given;
    if (rank_ == from) {
        as_many("scatter", inputs.at(0).size(), size_);
        alike("scatter", inputs[0], output);
        for (const auto& each : inputs[0]) {
            TORCH_CHECK_VALUE(each.numel() == output.numel(), "scatter: a tensor of ", each.numel(),
                              " elements in the list; ", output.numel(), " are needed");
            given.push_back(packed(each));
        }
    } else {
        TORCH_CHECK_VALUE(inputs.empty() || inputs[0].empty(), "scatter: rank ", rank_,
                          " is not the root and gives no list");
    }
    const Outputs places({output});
    Task task{call_of(Collective::kScatter, output, static_cast<std::size_t>(output.numel())), {}};
    task.call.root = from;
    task.run = [=, bytes = static_cast<std::size_t>(output.nbytes())](Board& board) {
        dist_prims::scatter(board, from, blocks_of(given), bytes_of(places.flat[0]), bytes);
        places.deliver();
    };
    return perform({std::move(task)}, how(OpType::SCATTER, "dist_prims:scatter", opts), outputs);
}

WorkPtr PrimsBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ReduceScatterOptions& opts) {
    if (!native()) return engine_->reduce_scatter(outputs, inputs, opts);
    const auto& output = only("reduce_scatter", outputs);
    return perform({reduce_scatter_task(output, inputs.at(0), opts.reduceOp)},
                   how(OpType::REDUCE_SCATTER, "dist_prims:reduce_scatter", opts), outputs);
}

WorkPtr PrimsBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& opts) {
    if (!native()) return engine_->_reduce_scatter_base(output, input, opts);
    return perform({reduce_scatter_task(output, blocks(packed(input), {}, "reduce_scatter"), opts.reduceOp)},
                   how(OpType::_REDUCE_SCATTER_BASE, "dist_prims:reduce_scatter", opts), {output});
}

WorkPtr PrimsBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& opts) {
    if (!native()) return engine_->reduce_scatter_tensor_coalesced(outputs, inputs, opts);
    std::vector<Task> tasks;
    for (std::size_t each = 0; each < inputs.size(); ++each) {
        tasks.push_back(
            reduce_scatter_task(outputs.at(each), blocks(packed(inputs[each]), {}, "reduce_scatter"), opts.reduceOp));
    }
    return perform(std::move(tasks), how(OpType::COALESCED, "dist_prims:reduce_scatter", opts), outputs);
}

WorkPtr PrimsBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                    std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
    if (!native()) return engine_->alltoall_base(output, input, output_splits, input_splits, opts);
    return perform({all_to_all_task(blocks(output, output_splits, "all_to_all"),
                                    blocks(packed(input), input_splits, "all_to_all"))},
                   how(OpType::ALLTOALL_BASE, "dist_prims:all_to_all", opts), {output});
}

WorkPtr PrimsBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
    if (!native()) return engine_->alltoall(outputs, inputs, opts);
    return perform({all_to_all_task(outputs, inputs)}, how(OpType::ALLTOALL, "dist_prims:all_to_all", opts), outputs);
}

WorkPtr PrimsBackend::barrier(const c10d::BarrierOptions& opts) {
    if (!native()) return engine_->barrier(opts);
    Task task{Call{}, [](Board& board) { dist_prims::barrier(board); }};
    return perform({std::move(task)}, how(OpType::BARRIER, "dist_prims:barrier", opts), {});
}

void PrimsBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
    engine_->monitoredBarrier(opts, wait_all_ranks);
}

WorkPtr PrimsBackend::send(Tensors& tensors, int to, int tag) {
    return engine_->send(tensors, to, tag);
}
WorkPtr PrimsBackend::recv(Tensors& tensors, int from, int tag) {
    return engine_->recv(tensors, from, tag);
}
WorkPtr PrimsBackend::recvAnysource(Tensors& tensors, int tag) {
    return engine_->recvAnysource(tensors, tag);
}

}  // namespace dist_prims
