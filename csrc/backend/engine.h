// A backend of torch.distributed as the engine between hosts.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../core/engine.h"

namespace dist_prims {

class BackendEngine : public Engine {
public:
    explicit BackendEngine(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

    Handle send(int to, int tag, const std::byte* data, std::size_t bytes) override;
    Handle receive(int from, int tag, std::byte* data, std::size_t bytes) override;

private:
    const c10::intrusive_ptr<c10d::Backend> backend_;
};

}  // namespace dist_prims
