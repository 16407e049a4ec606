#include "window.h"

#ifdef C10D_BACKEND_HAS_WINDOW
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

#include "../common/work.h"

namespace dist_prims {
namespace {

constexpr std::size_t kMostDimensions = 16;

enum class RegistrationProblem : std::int64_t { kNone, kNotShared, kNotContiguous, kTooManyDimensions, kNotMapped };

const char* text_of(RegistrationProblem problem) {
    switch (problem) {
        case RegistrationProblem::kNotShared:
            return "gives a tensor that its peers cannot map; make it with dist_prims.empty, of 4096 bytes or more "
                   "(a part of such a tensor will do)";
        case RegistrationProblem::kNotContiguous:
            return "gives a tensor that is not contiguous; register its contiguous() copy";
        case RegistrationProblem::kTooManyDimensions:
            return "gives a tensor of more than 16 dimensions; register a view of it";
        case RegistrationProblem::kNotMapped:
            return "cannot map the tensors of its peers; their processes must be in one PID namespace, and of one user";
        case RegistrationProblem::kNone:
            break;
    }
    return "";
}

// What each rank sends to the others about its tensor, or only a problem.
struct Registration {
    RegistrationProblem problem = RegistrationProblem::kNone;
    SharedTensorRef tensor_ref;
    std::int64_t dtype = 0, dimensions = 0;
    std::array<std::int64_t, kMostDimensions> shape{};
};

Registration describe_tensor(const at::Tensor& tensor) {
    Registration registration;
    if (!tensor.is_cpu() || tensor.layout() != at::kStrided) return {.problem = RegistrationProblem::kNotShared};
    if (!tensor.is_contiguous()) return {.problem = RegistrationProblem::kNotContiguous};
    if (tensor.sizes().size() > kMostDimensions) return {.problem = RegistrationProblem::kTooManyDimensions};
    registration.tensor_ref = Exporter::instance().ref_of(bytes_of(tensor), tensor.nbytes());
    if (!registration.tensor_ref.is_shared()) return {.problem = RegistrationProblem::kNotShared};
    registration.dtype = static_cast<std::int64_t>(tensor.scalar_type());
    registration.dimensions = tensor.dim();
    std::copy(tensor.sizes().begin(), tensor.sizes().end(), registration.shape.begin());
    return registration;
}

// Returns the registrations of all ranks, by an all_gather. Throws on every rank if one has a problem.
std::vector<Registration> gather_registrations(PrimsBackend& backend, const Registration& mine) {
    std::vector<Registration> all(static_cast<std::size_t>(backend.getSize()));
    const auto bytes = [](const Registration* first, std::size_t count) {
        return at::from_blob(const_cast<Registration*>(first), {static_cast<int64_t>(count * sizeof(Registration))},
                             at::kByte);
    };
    at::Tensor output = bytes(all.data(), all.size()), input = bytes(&mine, 1);
    c10d::AllgatherOptions options;
    options.asyncOp = false;
    backend._allgather_base(output, input, options)->wait();
    for (std::size_t rank = 0; rank < all.size(); ++rank)
        TORCH_CHECK_VALUE(all[rank].problem == RegistrationProblem::kNone, "window: rank ", rank, " ",
                          text_of(all[rank].problem));
    return all;
}

}  // namespace

void PrimsWindow::tensor_register(const at::Tensor& tensor, bool owning) {
    TORCH_CHECK_VALUE(tensors_.empty(), "window: rank ", backend_->getRank(),
                      " has registered a tensor already; call tensor_deregister first");
    backend_->check_alive("tensor_register", group_);
    // 1. Exchange the registrations, and map the tensors of all ranks.
    const auto registrations = gather_registrations(*backend_, describe_tensor(tensor));
    std::vector<RemoteTensor> tensors;
    for (std::size_t rank = 0; rank < registrations.size(); ++rank) {
        const Registration& peer = registrations[rank];
        auto mapping = importer_.map(backend_->process_of(static_cast<int>(rank)), peer.tensor_ref);
        std::byte* const data = mapping ? mapping->data() + peer.tensor_ref.offset : nullptr;
        tensors.push_back({std::move(mapping),
                           data,
                           {peer.shape.begin(), peer.shape.begin() + peer.dimensions},
                           static_cast<at::ScalarType>(peer.dtype)});
    }
    // 2. Throw on every rank if a rank could not map a tensor.
    const bool mapped =
        std::ranges::all_of(tensors, [](const RemoteTensor& tensor) { return tensor.mapping != nullptr; });
    gather_registrations(*backend_, {.problem = mapped ? RegistrationProblem::kNone : RegistrationProblem::kNotMapped});
    tensors_ = std::move(tensors);
    if (owning) owned_tensor_ = tensor;
}

void PrimsWindow::tensor_deregister() {
    TORCH_CHECK_VALUE(!tensors_.empty(), "window: rank ", backend_->getRank(), " has registered no tensor");
    backend_->check_alive("tensor_deregister", group_);
    gather_registrations(*backend_, {});  // a barrier: no rank uses the tensors any more
    tensors_.clear();
    owned_tensor_.reset();
}

void PrimsWindow::check_rank(const char* what, int64_t rank) const {
    TORCH_CHECK_VALUE(rank >= 0 && rank < backend_->getSize(), what, ": rank ", rank, " is not in a group of ",
                      backend_->getSize(), " ranks");
}

const PrimsWindow::RemoteTensor& PrimsWindow::registered_tensor(const char* what, int64_t rank) const {
    check_rank(what, rank);
    TORCH_CHECK_VALUE(!tensors_.empty(), what,
                      ": no tensor is registered with this window; all ranks call "
                      "tensor_register first");
    return tensors_[static_cast<std::size_t>(rank)];
}

WorkPtr PrimsWindow::put(const at::Tensor& tensor, int64_t to, int64_t offset, bool /*async*/,
                         const c10d::PutOptions&) {
    const RemoteTensor& target = registered_tensor("put", to);
    must_be_on_cpu("put", tensor);
    TORCH_CHECK_VALUE(tensor.scalar_type() == target.dtype, "put: rank ", backend_->getRank(), " gives ",
                      tensor.scalar_type(), " for a tensor of ", target.dtype, " on rank ", to,
                      "; convert it with to()");
    const int64_t capacity = c10::multiply_integers(target.shape);
    TORCH_CHECK_VALUE(offset >= 0 && offset <= capacity && tensor.numel() <= capacity - offset, "put: ", tensor.numel(),
                      " elements at offset ", offset, " do not fit into the ", capacity, " elements of rank ", to);
    backend_->check_alive("put", group_);
    const at::Tensor flat = packed(tensor);
    if (flat.nbytes() > 0)
        std::memcpy(target.data + static_cast<std::size_t>(offset) * tensor.element_size(), bytes_of(flat),
                    flat.nbytes());
    return c10::make_intrusive<DoneWork>(backend_->getRank(), c10d::OpType::UNKNOWN, Tensors{tensor}, 0);
}

at::Tensor PrimsWindow::map_remote_tensor(int64_t rank) {
    const RemoteTensor& target = registered_tensor("map_remote_tensor", rank);
    return at::from_blob(target.data, target.shape, [mapping = target.mapping](void*) {}, target.dtype);
}

WorkPtr PrimsWindow::signal(int64_t to, bool async, const c10d::SignalOptions& opts) {
    return signal_message(c10d::OpType::SEND, "dist_prims:signal", to, async, opts.timeout);
}

WorkPtr PrimsWindow::wait_signal(int64_t from, bool async, const c10d::WaitSignalOptions& opts) {
    return signal_message(c10d::OpType::RECV, "dist_prims:wait_signal", from, async, opts.timeout);
}

WorkPtr PrimsWindow::signal_message(c10d::OpType type, const char* title, int64_t peer, bool async,
                                    Milliseconds timeout) {
    check_rank(title, peer);
    backend_->check_alive(title, group_);
    auto work = backend_->signal(type, title, static_cast<int>(peer), number_, timeout);
    if (!async) work->wait();
    return work;
}

c10d::WindowAttr PrimsWindow::get_attr(int64_t rank) {
    check_rank("get_attr", rank);
    return {c10d::WindowAccessType::UNIFIED};
}

bool PrimsBackend::supportsWindow() const {
    return !spans_hosts();
}

c10::intrusive_ptr<c10d::Window> PrimsBackend::new_window(const std::optional<at::Tensor>& tensor) {
    check_owner();
    TORCH_CHECK_NOT_IMPLEMENTED(supportsWindow(), "rank ", rank_,
                                ": a window needs memory that all ranks can map, and this group spans hosts; split it "
                                "into groups of one host first");
    auto window = c10::make_intrusive<PrimsWindow>(c10::intrusive_ptr<PrimsBackend>::reclaim_copy(this), windows_++);
    if (tensor) window->tensor_register(*tensor, true);
    return window;
}

WorkPtr PrimsBackend::signal(c10d::OpType type, const char* title, int peer, std::uint64_t window,
                             Milliseconds timeout) {
    check_owner();
    static const at::Tensor kNothing = at::empty({0}, at::kByte);
    const CallOptions options{type, title, timeout == c10d::kUnsetTimeout ? options_->timeout : timeout, true};
    return start_message(options, {kNothing}, peer, PointToPoint::signal_tag(window));
}

void PrimsBackend::check_alive(const char* what, std::uint64_t group) const {
    check_owner();
    TORCH_CHECK(group == group_number_, what, ": rank ", rank_, ": the group has other members since this window was ",
                "made; make a new window");
    host_segment_->membership.check_abort([what] { return std::string(what); });
}

}  // namespace dist_prims
#endif
