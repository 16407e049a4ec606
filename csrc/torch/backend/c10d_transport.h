// A backend of torch.distributed as the transport between hosts: MPI.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../../net/transport.h"

namespace dist_prims {

class C10dTransport : public Transport {
public:
    C10dTransport(c10::intrusive_ptr<c10d::Backend> backend, int largest_tag)
        : backend_(std::move(backend)), largest_tag_(largest_tag) {}

    int largest_tag() const override { return largest_tag_; }
    Handle send(int to, int tag, const std::byte* data, std::size_t bytes, Owner owner) override;
    Handle receive(int from, int tag, std::byte* data, std::size_t bytes, Owner owner) override;

private:
    const c10::intrusive_ptr<c10d::Backend> backend_;
    const int largest_tag_;
};

}  // namespace dist_prims
