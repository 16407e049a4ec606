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

ProgramBuffer whole(const at::Tensor& tensor) {
    return ProgramBuffer::whole(bytes_of(tensor), static_cast<std::size_t>(tensor.numel()),
                                std::make_shared<const at::Tensor>(tensor));
}

ProgramBuffer in_blocks(const Tensors& inputs, const Tensors& outputs, const Counts& counts) {
    ProgramBuffer buffer;
    for (std::size_t block = 0; block < counts.size(); ++block) {
        const auto address = [&](const at::Tensor& each) { return each.defined() ? bytes_of(each) : nullptr; };
        buffer.blocks.push_back({address(inputs[block]), address(outputs[block]), counts[block]});
    }
    buffer.owner = std::make_shared<const std::pair<Tensors, Tensors>>(inputs, outputs);
    return buffer;
}

void Execution::execute_on_blocks(const NativeSchedule& schedule, const Call& call, const Tensors& inputs,
                                  const Tensors& outputs, const Counts& counts, Milliseconds timeout) {
    Tensors from = inputs, to = outputs;
    for (at::Tensor& each : from) {
        if (each.defined()) each = packed(each);
    }
    const bool overlap = outputs_overlap(from, to);
    for (at::Tensor& each : to) {
        if (each.defined() && (overlap || !is_packed(each))) each = at::empty(each.sizes(), each.options());
    }
    execute_schedule(schedule, call, in_blocks(from, to, counts), timeout);
    for (std::size_t block = 0; block < to.size(); ++block) {
        if (!to[block].is_same(outputs[block])) outputs[block].copy_(to[block]);
    }
}

}  // namespace dist_prims
