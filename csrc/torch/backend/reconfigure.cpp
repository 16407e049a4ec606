// Replaces the members of a group (torch.distributed's reconfigure, torch 2.15 or later).
//
// torch keeps the object of the group, and expects its backend to replace the members. So Python makes a new backend by
// the ordinary rendezvous, as for a repair (repair/reconfigure.py), and this backend exchanges its group for the group
// of the new one. The path of a collective is therefore the same as before. Work of the old group owns what it waits
// for, and remains valid.
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
    std::visit([&](const auto& handles) { request.handles.assign(handles.begin(), handles.end()); }, opts.handles);
    const auto new_backend =
        c10::dynamic_intrusive_pointer_cast<PrimsBackend>(setup_->make_reconfigured(*this, request));
    TORCH_INTERNAL_ASSERT(new_backend);
    take_group_from(*new_backend);
    return c10::make_intrusive<DoneWork>(rank_, c10d::OpType::UNKNOWN, Tensors{}, 0);
}

void PrimsBackend::use_uuid(std::int64_t uuid) {
    TORCH_CHECK(used_uuids_.insert(uuid).second, "rank ", rank_, ": reconfigure: the uuid ", uuid,
                " was already used; each call needs another one, which all members pass");
}

// Exchanges the groups of both objects. The group of this object has ended: no job and no message is left that would
// use this object. `new_backend` is destroyed with it.
void PrimsBackend::take_group_from(PrimsBackend& new_backend) {
    rank_ = new_backend.rank_;
    size_ = new_backend.size_;
    std::swap(setup_, new_backend.setup_);
    std::swap(trace_group_, new_backend.trace_group_);
    std::swap(gloo_, new_backend.gloo_);
    std::swap(host_segment_, new_backend.host_segment_);
    std::swap(execution_, new_backend.execution_);
    std::swap(queue_, new_backend.queue_);
    options_->global_ranks_in_group = setup_->ranks;
    sequence_ = messages_ = incrementals_ = windows_ = 0;  // as on ranks that are new
    awaits_members_ = false;
    ++group_number_;
}

}  // namespace dist_prims
#endif
