// Collectives of a group whose ranks are all on one host: phases of the slot exchange; an all_reduce of a size with a
// pinned schedule follows that schedule.
#pragma once

#include "execution.h"

namespace dist_prims {

class SingleHostExecution : public Execution {
public:
    SingleHostExecution(std::shared_ptr<HostSegment> host_segment, int rank, int size);

    void agree(const Call& call, Milliseconds timeout) override;
    PrimsTask all_reduce(Call call, const at::Tensor& input, const at::Tensor& output) override;
    PrimsTask broadcast(Call call, const at::Tensor& tensor) override;
    PrimsTask reduce(Call call, const at::Tensor& input, const at::Tensor& output) override;
    PrimsTask all_gather(Call call, const at::Tensor& input, const Tensors& outputs) override;
    PrimsTask reduce_scatter(Call call, const Tensors& inputs, const at::Tensor& output) override;
    PrimsTask all_to_all(Call call, const Tensors& inputs, const Tensors& outputs) override;
    PrimsTask gather(Call call, const at::Tensor& input, const Tensors& outputs) override;
    PrimsTask scatter(Call call, const Tensors& inputs, const at::Tensor& output) override;
    void monitored_barrier(Milliseconds limit, bool wait_all_ranks) override;

    SchedulePtr schedule_for(Collective collective, std::uint64_t bytes, int root = -1) override;
    bool has_no_schedules() const override { return !has_pins(); }
    bool reduces_in_place(const at::Tensor& tensor) override;

private:
    Router& router() override { return router_; }
    SlotExchange& open(const Call& call, Milliseconds timeout);
    [[noreturn]] void give_up_monitored_barrier(const std::vector<int>& late, Milliseconds limit);

    Router router_;  // for pinned schedules
};

}  // namespace dist_prims
