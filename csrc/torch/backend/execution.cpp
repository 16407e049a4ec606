#include "execution.h"

#include <algorithm>
#include <stdexcept>

namespace dist_prims {

const at::Tensor& first_defined(const Tensors& inputs, const Tensors& outputs) {
    for (const Tensors* each : {&inputs, &outputs}) {
        const auto found = std::find_if(each->begin(), each->end(), [](const auto& one) { return one.defined(); });
        if (found != each->end()) return *found;
    }
    throw std::invalid_argument("a collective needs a tensor");
}

void Execution::pin(std::vector<NativeSchedule> schedules) {
    const std::lock_guard lock(pins_guard_);
    pins_.clear();
    for (NativeSchedule& each : schedules) pins_.push_back(std::make_shared<const NativeSchedule>(std::move(each)));
    has_pins_ = !pins_.empty();
}

SchedulePtr Execution::pinned(std::uint64_t bytes) {
    const std::lock_guard lock(pins_guard_);
    return find(pins_, bytes);
}

SchedulePtr Execution::find(const std::vector<SchedulePtr>& schedules, std::uint64_t bytes) {
    const auto found = std::find_if(schedules.begin(), schedules.end(),
                                    [&](const auto& each) { return each->low <= bytes && bytes < each->high; });
    return found == schedules.end() ? nullptr : *found;
}

PrimsTask Execution::by_schedule(const SchedulePtr& schedule, Call call, const Tensors& inputs, const Tensors& outputs,
                                 const Counts& counts, const std::function<void()>& check) {
    call.by(schedule->name);
    return {call, [=, this](const Call& call, Milliseconds timeout) {
                agree(call, timeout);
                if (check) check();
                execute_on_blocks(*schedule, call, inputs, outputs, counts, timeout);
            }};
}

void Execution::execute_schedule(const NativeSchedule& schedule, const Call& call, const at::Tensor& data,
                                 Milliseconds timeout, const Counts& blocks) {
    const ProgramBuffer buffer{bytes_of(data), call.count, blocks, std::make_shared<const at::Tensor>(data)};
    execute(schedule.program, router(), call.dtype, call.op, buffer, schedule.segments, timeout);
}

void Execution::execute_on_blocks(const NativeSchedule& schedule, const Call& call, const Tensors& inputs,
                                  const Tensors& outputs, const Counts& counts, Milliseconds timeout) {
    const bool is_whole = counts.size() == 1;
    const bool is_in_place = is_whole && outputs[0].defined() && packed(outputs[0]).is_same(outputs[0]);
    const at::Tensor& like = first_defined(inputs, outputs);
    const at::Tensor data =
        is_in_place ? outputs[0].view(-1) : at::empty({static_cast<int64_t>(call.count)}, like.options());
    const Tensors parts = data.split_with_sizes(std::vector<int64_t>(counts.begin(), counts.end()));
    for (std::size_t block = 0; block < parts.size(); ++block) {
        const at::Tensor& input = inputs[block];
        if (input.defined() && input.data_ptr() != parts[block].data_ptr())
            parts[block].copy_(input.contiguous().view(-1));
    }
    execute_schedule(schedule, call, data, timeout, is_whole ? Counts{} : counts);
    for (std::size_t block = 0; block < parts.size() && !is_in_place; ++block) {
        if (outputs[block].defined()) outputs[block].copy_(parts[block].view_as(outputs[block]));
    }
}

}  // namespace dist_prims
