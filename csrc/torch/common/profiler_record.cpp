#include "profiler_record.h"

#include <c10/util/ThreadLocalDebugInfo.h>

#include <string_view>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <tuple>

namespace dist_prims {
namespace {

int64_t elements_of(const Tensors& tensors) {
    int64_t sum = 0;
    for (const auto& tensor : tensors) sum += tensor.numel();
    return sum;
}

// The global ranks of a group as the event describes them: the first one, and the difference of each two that follow
// each other. Stride -1: the differences are not the same.
struct RankRange {
    int start = 0, stride = 1;

    explicit RankRange(const std::vector<uint64_t>& ranks) {
        if (ranks.empty()) return;
        start = static_cast<int>(ranks[0]);
        if (ranks.size() > 1) stride = static_cast<int>(ranks[1]) - start;
        for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
            if (static_cast<int>(ranks[rank]) - static_cast<int>(ranks[rank - 1]) != stride) stride = -1;
        }
    }
};

// Makes torch's ParamCommsDebugInfo. torch 2.11 and 2.12 lack the field is_async and the sequence number.
template <typename Info, typename... Fields>
std::shared_ptr<Info> info_of(bool is_async, int64_t sequence, bool is_message, Fields&&... fields) {
    std::shared_ptr<Info> info;
    if constexpr (std::is_constructible_v<Info, Fields..., bool>)
        info = std::make_shared<Info>(std::forward<Fields>(fields)..., is_async);
    else
        info = std::make_shared<Info>(std::forward<Fields>(fields)...);
    if constexpr (requires { info->setSequenceInfo(sequence, is_message); })
        info->setSequenceInfo(sequence, is_message);
    return info;
}

}  // namespace

struct ProfilerRecord::Event {
    c10::DebugInfoGuard guard;
    std::vector<c10::IValue> inputs;
    at::RecordFunction function;  // the last member: its destructor ends the event, and reads the other members

    Event(std::shared_ptr<c10::DebugInfoBase> info, std::vector<c10::IValue> inputs, at::StepCallbacks callbacks)
        : guard(c10::DebugInfoKind::PARAM_COMMS_INFO, std::move(info)),
          inputs(std::move(inputs)),
          function(std::move(callbacks)) {}
};

void ProfilerRecord::start(at::StepCallbacks callbacks, ProfiledCall call) {
    // 1. Record only the calls whose data this backend moves itself.
    if (call.group.empty()) return;  // nameless: it carries the messages of another backend's group
    const bool has_input = !call.inputs.empty(), has_output = !call.outputs.empty();
    const at::Tensor like = has_input ? call.inputs[0] : has_output ? call.outputs[0] : at::Tensor();
    if (like.defined() && !like.is_cpu()) return;  // NCCL makes the event
    // 2. The numbers that NCCL's records have, so that the same tools can read them.
    int64_t in = elements_of(call.inputs), out = elements_of(call.outputs);
    // A rank that is not the root may have no input of a scatter or broadcast, and no output of a gather or reduce.
    const std::string_view name = call.name;
    if (!has_input) in = name == "scatter" ? out * call.size : out;
    if (!has_output) out = name == "gather" ? in * call.size : in;
    const at::ScalarType dtype = like.defined() ? like.scalar_type() : at::kByte;
    const int rank = call.peer >= 0 ? static_cast<int>(call.peer) : call.rank;
    const RankRange range(call.global_ranks);
    const auto sequence = static_cast<int64_t>(call.sequence);
    const auto group = std::make_tuple(call.group, call.group_description);
    const auto info = info_of<torch::ParamCommsDebugInfo>(call.is_async, sequence, call.is_message, group, rank,
                                                          std::string(call.name), in, out, dtype, call.input_splits,
                                                          call.output_splits, range.start, range.stride, call.size);
    // 3. Begin the event; it ends with this object.
    event_ =
        std::make_unique<Event>(info,
                                std::vector<c10::IValue>{call.inputs, std::make_tuple(sequence, call.is_message), group,
                                                         rank, call.name, call.input_splits, call.output_splits,
                                                         range.start, range.stride, call.size, call.is_async},
                                std::move(callbacks));
    at::RecordFunction& function = event_->function;
    if (function.needsInputs())
        function.before(at::kParamCommsCallName, &event_->inputs);
    else
        function.before(at::kParamCommsCallName);
    if (function.needsOutputs()) function.setOutputs(std::vector<c10::IValue>{call.outputs});
}

void append_defined(Tensors& tensors, const at::Tensor& argument) {
    if (argument.defined()) tensors.push_back(argument);
}

void append_defined(Tensors& tensors, const Tensors& argument) {
    for (const auto& tensor : argument) append_defined(tensors, tensor);
}

void append_defined(Tensors& tensors, const std::vector<Tensors>& argument) {
    for (const auto& list : argument) append_defined(tensors, list);
}

}  // namespace dist_prims
