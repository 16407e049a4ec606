// A collective with its data, as it runs: what the ranks must agree on, and the tensors of this rank.
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
    int segments = 1;
    RankProgram program{};
    bool is_slower_than_piggyback = false;
    bool is_piggyback = false;  // no program: the data travels in the messages of the agreement (net/piggyback.h)
};
using SchedulePtr = std::shared_ptr<const NativeSchedule>;

// The tensors are listed by block of the data, undefined where this rank has none. The arguments are checked. An
// all_to_all lists the blocks that it sends as inputs, and the blocks that it receives as outputs. Its schedule has two
// blocks for each rank: first those that are sent, then those that are received.
struct CollectiveCall {
    Call announced;  // what the ranks agree on
    Tensors inputs, outputs;
    Counts counts;  // elements of each block
    // The schedule; null: phases of the slot exchange. Execution::prepare() sets it where no rank has named one.
    SchedulePtr schedule{};
    // Called when all ranks are about to make the call; throws where it must not be made.
    std::function<void()> check{};
    // Whether a rank knows the lengths of its own blocks only, so that the ranks have to compare them.
    bool is_variable_length = false;

    std::shared_ptr<IncrementalReduce> incremental{};  // the sum to complete, in place of the all_reduce itself

    // Set by Execution::prepare():
    SchedulePtr uneven_schedule{};  // of an exchange: the schedule if the blocks differ in length
    Tensors user_outputs{};  // where the outputs are copied at the end; empty if they are the tensors of the user

    std::size_t bytes() const;  // of all blocks
};

// Makes the calls of a rank from the arguments of a user, and checks these.
struct CallBuilder {
    int rank, size;

    CollectiveCall all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op) const;
    CollectiveCall broadcast(const at::Tensor& tensor, int64_t root) const;
    CollectiveCall reduce(const at::Tensor& tensor, const c10d::ReduceOp& op, int64_t root) const;
    CollectiveCall all_gather(const at::Tensor& input, const Tensors& outputs) const;
    CollectiveCall reduce_scatter(const Tensors& inputs, const at::Tensor& output, const c10d::ReduceOp& op) const;
    // The list of the root is the only one in its argument; other ranks give an empty list or none.
    CollectiveCall gather(const at::Tensor& input, const std::vector<Tensors>& outputs, int64_t root) const;
    CollectiveCall scatter(const std::vector<Tensors>& inputs, const at::Tensor& output, int64_t root) const;
    CollectiveCall all_to_all(const Tensors& inputs, const Tensors& outputs) const;

    // The list of blocks in which this rank has only its own.
    Tensors own_block(const at::Tensor& tensor) const;

private:
    int checked_root(const char* what, int64_t root) const;
    Tensors list_of_root(const char* what, const std::vector<Tensors>& lists, int root, const char* verb) const;
};

// The call of a collective without a schedule. `like` has its type.
CollectiveCall call_of_blocks(Collective collective, const at::Tensor& like, Tensors inputs, Tensors outputs,
                              Counts counts, Op op = Op::kNone, int root = -1);

// The first tensor that this rank has; there is one.
const at::Tensor& first_defined(const Tensors& inputs, const Tensors& outputs);
std::size_t sum_of(const Counts& counts);

}  // namespace dist_prims
