// Collectives of a group that spans hosts: schedules, or an exchange in which every rank sends each its block.
#pragma once

#include <map>

#include "../../net/multi_host.h"
#include "execution.h"

namespace dist_prims {

class MultiHostExecution : public Execution {
public:
    // Returns the cheapest schedule for a size.
    using Choose = std::function<NativeSchedule(const std::string& collective, std::uint64_t bytes, int root)>;

    // `engine` carries messages between hosts.
    MultiHostExecution(std::shared_ptr<HostSegment> host_segment, int rank, int size, Hosts hosts,
                       c10::intrusive_ptr<c10d::Backend> engine, int largest_tag, Choose choose);

    void agree(const Call& call, Milliseconds timeout) override { group_.agree(call, timeout); }
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

    bool spans_hosts() const override { return true; }
    c10d::Backend* carrier(int tag) override;
    void wake() override { group_.remote.wake(); }
    void forward_notice() override;
    void forward_leave() override;

private:
    Router& router() override { return group_.router; }
    SchedulePtr known_schedule(Collective collective, std::uint64_t bytes, int root);
    PrimsTask by_chosen_schedule(const Call& call, const Tensors& inputs, const Tensors& outputs, const Counts& counts);
    void exchange(const Call& call, const Blocks& in, const Counts& outgoing, const Places& out, const Counts& incoming,
                  Milliseconds timeout, const Transport::Owner& owner);
    void compare_lengths(const Call& call, const Counts& outgoing, const Counts& incoming, Milliseconds timeout);

    const c10::intrusive_ptr<c10d::Backend> engine_;
    const Choose choose_;
    MultiHostGroup group_;
    std::mutex chosen_guard_;
    std::map<std::pair<Collective, int>, std::vector<SchedulePtr>> chosen_;  // by collective and root
};

}  // namespace dist_prims
