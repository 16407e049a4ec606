// The event "record_param_comms" of a call, in torch.profiler and in torch's execution trace: the collective's name,
// its sizes, dtype and group. Tools such as Holistic Trace Analysis and Chakra read these events.
#pragma once

#include <ATen/record_function.h>

#include <memory>
#include <string>
#include <vector>

#include "tensor_arguments.h"

namespace dist_prims {

// The fields of the event.
struct ProfiledCall {
    const char* name;  // as ProcessGroupNCCL names the call: the tools know these names
    bool is_async, is_message;
    std::uint64_t sequence;  // the number of the call in its group
    int64_t peer;            // the root of a collective, the other rank of a message; -1: none
    Tensors inputs, outputs;
    std::vector<int64_t> input_splits, output_splits;
    std::string group, group_description;
    int rank, size;
    std::vector<uint64_t> global_ranks;  // by rank of the group; empty in the default group
};

// The event of one call, which begins and ends with this object. Without a profiler in this thread, it only reads a
// thread-local variable.
class ProfilerRecord {
public:
    // `describe` returns the ProfiledCall; it is called only while a profiler or an observer runs in this thread.
    template <typename Describe>
    explicit ProfilerRecord(const Describe& describe) {
        auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
        if (callbacks.has_value()) [[unlikely]]
            start_described(*callbacks, describe);
    }
    ProfilerRecord(const ProfilerRecord&) = delete;

private:
    struct Event;
    template <typename Describe>
    [[gnu::noinline, gnu::cold]] void start_described(at::StepCallbacks& callbacks, const Describe& describe) {
        start(std::move(callbacks), describe());
    }
    void start(at::StepCallbacks callbacks, ProfiledCall call);

    std::shared_ptr<Event> event_;  // null: nothing is recorded
};

// Appends the defined tensors of an argument.
void append_defined(Tensors& tensors, const at::Tensor& argument);
void append_defined(Tensors& tensors, const Tensors& argument);
void append_defined(Tensors& tensors, const std::vector<Tensors>& argument);

}  // namespace dist_prims
