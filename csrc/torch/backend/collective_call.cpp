#include "collective_call.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace dist_prims {
namespace {

std::size_t count_of(const at::Tensor& tensor) {
    return static_cast<std::size_t>(tensor.numel());
}

std::size_t longest_of(const Tensors& tensors) {
    std::size_t longest = 0;
    for (const auto& tensor : tensors) longest = std::max(longest, tensor.defined() ? tensor.nbytes() : 0);
    return longest;
}

}  // namespace

std::size_t sum_of(const Counts& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

const at::Tensor& first_defined(const Tensors& inputs, const Tensors& outputs) {
    for (const Tensors* tensors : {&inputs, &outputs}) {
        for (const at::Tensor& tensor : *tensors) {
            if (tensor.defined()) return tensor;
        }
    }
    throw std::invalid_argument("a collective needs a tensor");
}

std::size_t CollectiveCall::bytes() const {
    return sum_of(counts) * size_of(announced.dtype);
}

// The ranks agree on the number of elements, and on the length of each block where there are several. In a
// variable-length call they announce the longest block instead: with the slot exchange, it says how many phases the
// call takes. The blocks of a scatter have one length, which every rank compares with its output; in a gather the root
// may expect other lengths than a rank sends.
CollectiveCall call_of_blocks(Collective collective, const at::Tensor& like, Tensors inputs, Tensors outputs,
                              Counts counts, Op op, int root) {
    CollectiveCall call{announced_call(collective, like, 0), std::move(inputs), std::move(outputs), std::move(counts)};
    for (const Tensors* const tensors : {&call.inputs, &call.outputs}) {
        for (const at::Tensor& tensor : *tensors)
            TORCH_CHECK_VALUE(!tensor.defined() || has_memory(tensor), name_of(collective), kNoMemory);
    }
    call.is_variable_length = collective == Collective::kGather || collective == Collective::kAllToAll;
    call.announced.op = op;
    call.announced.root = root;
    if (collective == Collective::kGather) {
        call.announced.longest = longest_of(call.inputs);
    } else if (collective == Collective::kAllToAll) {
        call.announced.longest = std::max(longest_of(call.inputs), longest_of(call.outputs));
    } else if (collective == Collective::kAllGather || collective == Collective::kReduceScatter) {
        call.announced.count = sum_of(call.counts);
        call.announced.layout = checksum_of(call.counts);
    } else {
        call.announced.count = call.counts[0];
    }
    return call;
}

// A list of blocks of which this rank has only its own.
Tensors CallBuilder::own_block(const at::Tensor& tensor) const {
    Tensors blocks(static_cast<std::size_t>(size));
    blocks[static_cast<std::size_t>(rank)] = tensor;
    return blocks;
}

int CallBuilder::checked_root(const char* what, int64_t root) const {
    TORCH_CHECK_VALUE(root >= 0 && root < size, what, ": root ", root, " is not in a group of ", size, " ranks");
    return static_cast<int>(root);
}

// Returns the list of the root, and undefined tensors on other ranks. `verb`: what a rank does with its list, in
// errors.
Tensors CallBuilder::list_of_root(const char* what, const std::vector<Tensors>& lists, int root,
                                  const char* verb) const {
    if (rank == root) {
        must_be_one_per_rank(what, lists.at(0).size(), size);
        return lists[0];
    }
    TORCH_CHECK_VALUE(lists.empty() || lists[0].empty(), what, ": rank ", rank, " is not the root and ", verb,
                      " no list");
    return Tensors(static_cast<std::size_t>(size));
}

CollectiveCall CallBuilder::all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op) const {
    const Op kind = checked_op("all_reduce", op, tensor);
    return call_of_blocks(Collective::kAllReduce, tensor, {premultiplied("all_reduce", tensor, op)}, {tensor},
                          {count_of(tensor)}, kind);
}

// The root's tensor is also its output, if it is packed: some schedules send the root data that it has.
CollectiveCall CallBuilder::broadcast(const at::Tensor& tensor, int64_t root) const {
    const int from = checked_root("broadcast", root);
    const bool is_root = rank == from, is_written = !is_root || is_packed(tensor);
    return call_of_blocks(Collective::kBroadcast, tensor, {is_root ? tensor : at::Tensor()},
                          {is_written ? tensor : at::Tensor()}, {count_of(tensor)}, Op::kNone, from);
}

CollectiveCall CallBuilder::reduce(const at::Tensor& tensor, const c10d::ReduceOp& op, int64_t root) const {
    const int to = checked_root("reduce", root);
    const Op kind = checked_op("reduce", op, tensor);
    return call_of_blocks(Collective::kReduce, tensor, {premultiplied("reduce", tensor, op)},
                          {rank == to ? tensor : at::Tensor()}, {count_of(tensor)}, kind, to);
}

CollectiveCall CallBuilder::all_gather(const at::Tensor& input, const Tensors& outputs) const {
    must_be_one_per_rank("all_gather", outputs.size(), size);
    must_be_alike("all_gather", outputs, input);
    const auto own = outputs[static_cast<std::size_t>(rank)].numel();
    TORCH_CHECK_VALUE(own == input.numel(), "all_gather: rank ", rank, " gives ", input.numel(),
                      " elements and expects ", own, " from itself");
    return call_of_blocks(Collective::kAllGather, input, own_block(input), outputs, element_counts(outputs));
}

CollectiveCall CallBuilder::reduce_scatter(const Tensors& inputs, const at::Tensor& output,
                                           const c10d::ReduceOp& op) const {
    const Op kind = checked_op("reduce_scatter", op, output);
    must_be_one_per_rank("reduce_scatter", inputs.size(), size);
    must_be_alike("reduce_scatter", inputs, output);
    const auto own = inputs[static_cast<std::size_t>(rank)].numel();
    TORCH_CHECK_VALUE(own == output.numel(), "reduce_scatter: rank ", rank, " has room for ", output.numel(),
                      " elements and gives ", own, " to itself");
    Tensors addends;
    for (const auto& input : inputs) addends.push_back(premultiplied("reduce_scatter", input, op));
    return call_of_blocks(Collective::kReduceScatter, output, std::move(addends), own_block(output),
                          element_counts(inputs), kind);
}

CollectiveCall CallBuilder::gather(const at::Tensor& input, const std::vector<Tensors>& outputs, int64_t root) const {
    const int to = checked_root("gather", root);
    const bool is_root = rank == to;
    Tensors list = list_of_root("gather", outputs, to, "takes");
    if (is_root) must_be_alike("gather", list, input);
    Counts counts = is_root ? element_counts(list) : Counts(list.size(), count_of(input));
    return call_of_blocks(Collective::kGather, input, own_block(input), std::move(list), std::move(counts), Op::kNone,
                          to);
}

CollectiveCall CallBuilder::scatter(const std::vector<Tensors>& inputs, const at::Tensor& output, int64_t root) const {
    const int from = checked_root("scatter", root);
    Tensors list = list_of_root("scatter", inputs, from, "gives");
    if (rank == from) must_be_alike("scatter", list, output);
    for (const auto& block : list)
        TORCH_CHECK_VALUE(!block.defined() || block.numel() == output.numel(), "scatter: a tensor of ", block.numel(),
                          " elements in the list; ", output.numel(), " are needed");
    Counts counts(list.size(), count_of(output));
    return call_of_blocks(Collective::kScatter, output, std::move(list), own_block(output), std::move(counts),
                          Op::kNone, from);
}

CollectiveCall CallBuilder::all_to_all(const Tensors& inputs, const Tensors& outputs) const {
    must_be_one_per_rank("all_to_all", outputs.size(), size);
    must_be_one_per_rank("all_to_all", inputs.size(), size);
    must_be_alike("all_to_all", outputs, inputs[0]);
    must_be_alike("all_to_all", inputs, inputs[0]);
    return call_of_blocks(Collective::kAllToAll, inputs[0], inputs, outputs, element_counts(inputs));
}

}  // namespace dist_prims
