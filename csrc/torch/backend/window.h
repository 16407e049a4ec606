// One-sided access (torch.distributed's Window, torch 2.15 or later): each rank registers a shared tensor, and its
// peers read and write it without a call of that rank.
//
// A window belongs to a group on one host. A put copies data into the memory of the peer, which is mapped here
// (shared_tensors.h): it is done when it returns. A signal is a message without data, under tags that users do not
// have. A wait for a signal is therefore a receive, with the same timeout and the same checks for failures. What a rank
// has put before it sends a signal is visible to the peer after the wait for the signal: the copy comes before the
// store of `written` (shm/p2p.h), which the peer loads before the wait ends.
#pragma once

#include "backend.h"

#ifdef C10D_BACKEND_HAS_WINDOW
#include <torch/csrc/distributed/c10d/Window.hpp>

namespace dist_prims {

class PrimsWindow : public c10d::Window {
public:
    // `number`: how many windows the group has made before. Every rank must make its windows in the same order.
    PrimsWindow(c10::intrusive_ptr<PrimsBackend> backend, std::uint64_t number)
        : backend_(std::move(backend)), number_(number), group_(backend_->group_number()) {}

    // Every rank must call these two. With `owning` the window keeps the tensor alive.
    void tensor_register(const at::Tensor& tensor, bool owning) override;
    void tensor_deregister() override;
    WorkPtr put(const at::Tensor& tensor, int64_t to, int64_t offset, bool async,
                const c10d::PutOptions& opts) override;
    at::Tensor map_remote_tensor(int64_t rank) override;
    WorkPtr signal(int64_t to, bool async, const c10d::SignalOptions& opts) override;
    WorkPtr wait_signal(int64_t from, bool async, const c10d::WaitSignalOptions& opts) override;
    c10d::WindowAttr get_attr(int64_t rank) override;

private:
    // The registered tensor of one rank, mapped into this process.
    struct RemoteTensor {
        std::shared_ptr<const Mapping> mapping;
        std::byte* data;  // in the mapping
        std::vector<int64_t> shape;
        at::ScalarType dtype;
    };

    void check_rank(const char* what, int64_t rank) const;
    const RemoteTensor& registered_tensor(const char* what, int64_t rank) const;
    WorkPtr signal_message(c10d::OpType type, const char* title, int64_t peer, bool async, Milliseconds timeout);

    const c10::intrusive_ptr<PrimsBackend> backend_;
    const std::uint64_t number_, group_;  // group_: PrimsBackend::group_number() when the window was made
    Importer importer_;
    std::vector<RemoteTensor> tensors_;  // by rank; empty: none is registered
    at::Tensor owned_tensor_;            // the tensor of this rank, if the window owns it
};

}  // namespace dist_prims
#endif
