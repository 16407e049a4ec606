// Replaces the members of a group (torch.distributed's reconfigure, torch 2.15 or later).
//
// torch keeps the object of the group and expects its backend to replace the members. A second backend is made by the
// ordinary rendezvous, as for a repair (repair/reconfigure.py), and the first one takes its group over. The path of a
// collective is therefore the same as before. Work of the old group owns what it waits for, and remains valid.
#include "backend.h"

#ifdef C10D_BACKEND_HAS_RECONFIGURE
#include <variant>

#include "../common/work.h"

namespace dist_prims {

void PrimsBackend::await_members(int rank, int size) {
    rank_ = rank;
    size_ = size;
    awaits_members_ = true;
}

c10d::ReconfigureHandle PrimsBackend::get_reconfigure_handle() const {
    if (handle_.empty()) handle_ = setup_->make_handle(rank_);
    return handle_;
}

WorkPtr PrimsBackend::reconfigure(const c10d::ReconfigureOptions& opts) {
    Reconfiguration request{.uuid = opts.uuid,
                            .own = get_reconfigure_handle(),
                            .handles = {},
                            .is_ordered = std::holds_alternative<std::vector<c10d::ReconfigureHandle>>(opts.handles),
                            .timeout = opts.timeout.value_or(options_->timeout)};
    std::visit([&](const auto& given) { request.handles.assign(given.begin(), given.end()); }, opts.handles);
    const auto made = c10::dynamic_intrusive_pointer_cast<PrimsBackend>(setup_->make_reconfigured(*this, request));
    TORCH_INTERNAL_ASSERT(made);
    take_group_from(*made);
    return c10::make_intrusive<DoneWork>(rank_, c10d::OpType::UNKNOWN, Tensors{}, 0);
}

void PrimsBackend::use_uuid(std::int64_t uuid) {
    TORCH_CHECK(used_uuids_.insert(uuid).second, "rank ", rank_, ": reconfigure: the uuid ", uuid,
                " was already used; each call needs another one, which all members pass");
}

// Exchanges the groups of this object and `made`. The group of this object has ended: it has no job and no message left
// that would use this object.
void PrimsBackend::take_group_from(PrimsBackend& made) {
    rank_ = made.rank_;
    size_ = made.size_;
    std::swap(setup_, made.setup_);
    std::swap(trace_group_, made.trace_group_);
    std::swap(gloo_, made.gloo_);
    std::swap(host_segment_, made.host_segment_);
    std::swap(execution_, made.execution_);
    std::swap(queue_, made.queue_);
    options_->global_ranks_in_group = setup_->ranks;
    sequence_ = messages_ = incrementals_ = windows_ = 0;  // as on ranks that are new
    awaits_members_ = false;
    ++group_number_;
}

}  // namespace dist_prims
#endif
