// A collective with its data: what the ranks must agree on, and the tensors of this rank.
//
// CallBuilder makes a CollectiveCall of the arguments of a user, Execution::prepare() chooses its schedule, and
// Execution::run() runs it.
//
// A block is the part of the data that belongs to one rank. A variable-length call is a gather or an all_to_all: each
// rank knows the lengths of its own blocks only, so the ranks have to compare them before they move the data.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../../net/schedule_executor.h"
#include "../../shm/incremental_reduce.h"
#include "../common/tensor_arguments.h"

namespace dist_prims {

// A schedule for a range of sizes of a collective, as this rank executes it.
struct NativeSchedule {
    std::uint64_t low = 0, high = 0;  // the sizes in bytes: low <= size < high
    std::string name;
    int segments = 1;  // into which each chunk is cut
    RankProgram program{};
    bool is_slower_than_piggyback = false;
    bool is_piggyback = false;  // no program: the data travels in the messages of the agreement (net/piggyback.h)
};
using SchedulePtr = std::shared_ptr<const NativeSchedule>;

// The lists have one tensor for each block, undefined where this rank has none. An all_to_all lists the blocks that it
// sends as inputs, and the blocks that it receives as outputs. Its schedule needs two blocks for each rank: all blocks
// that are sent, followed by all blocks that are received.
struct CollectiveCall {
    Call announced;  // what the ranks agree on
    Tensors inputs, outputs;
    Counts counts;  // elements of each block
    // The schedule that the caller has named, or that Execution::prepare() has chosen. Null: the call runs in phases of
    // the slot exchange of one host.
    SchedulePtr schedule{};
    // Called when all ranks have agreed to run a schedule; throws if the call must not run.
    std::function<void()> check{};
    bool is_variable_length = false;
    std::shared_ptr<IncrementalReduce> incremental{};  // the sum to complete, in place of the all_reduce itself

    // Set by Execution::prepare():
    bool is_schedule_named = false;  // a variable-length call follows its schedule for blocks of different lengths, too
    Tensors user_outputs{};  // where the outputs are copied at the end; empty if they are the tensors of the user

    std::size_t bytes() const;  // of all blocks
};

// Makes the calls of a rank from the arguments of a user. Throws ValueError if an argument is wrong.
struct CallBuilder {
    int rank, size;

    CollectiveCall all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op) const;
    CollectiveCall broadcast(const at::Tensor& tensor, int64_t root) const;
    CollectiveCall reduce(const at::Tensor& tensor, const c10d::ReduceOp& op, int64_t root) const;
    CollectiveCall all_gather(const at::Tensor& input, const Tensors& outputs) const;
    CollectiveCall reduce_scatter(const Tensors& inputs, const at::Tensor& output, const c10d::ReduceOp& op) const;
    // `outputs` of gather and `inputs` of scatter hold one list on the root, and an empty list or none on other ranks.
    CollectiveCall gather(const at::Tensor& input, const std::vector<Tensors>& outputs, int64_t root) const;
    CollectiveCall scatter(const std::vector<Tensors>& inputs, const at::Tensor& output, int64_t root) const;
    CollectiveCall all_to_all(const Tensors& inputs, const Tensors& outputs) const;

private:
    Tensors own_block(const at::Tensor& tensor) const;
    int checked_root(const char* what, int64_t root) const;
    Tensors list_of_root(const char* what, const std::vector<Tensors>& lists, int root, const char* verb) const;
};

// Makes a call without a schedule, of arguments that are checked.
//
// Args:
//     like: a tensor of the call's type.
//     inputs, outputs: by block.
//     counts: the elements of each block.
//     op: the reduction; kNone for a collective that does not reduce.
//     root: -1 for a collective without a root.
CollectiveCall call_of_blocks(Collective collective, const at::Tensor& like, Tensors inputs, Tensors outputs,
                              Counts counts, Op op = Op::kNone, int root = -1);

// Returns the first defined tensor of the inputs or else of the outputs. Throws if there is none.
const at::Tensor& first_defined(const Tensors& inputs, const Tensors& outputs);
std::size_t sum_of(const Counts& counts);

}  // namespace dist_prims
