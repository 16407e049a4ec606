// A context and a worker of UCX. Each transport has its own, used by one thread at a time under the lock of the lane.
#pragma once

#include <string>

#include "calls.h"
#include "library.h"

namespace dist_prims::ucx {

class Worker {
public:
    // Throws std::runtime_error.
    explicit Worker(const Settings& settings);
    ~Worker();
    Worker(const Worker&) = delete;

    std::string address() const;
    int descriptor() const { return descriptor_; }
    ucp_worker_h get() const { return worker_; }

private:
    void create_worker();

    ucp_context_h context_ = nullptr;
    ucp_worker_h worker_ = nullptr;
    int descriptor_ = -1;
};

}  // namespace dist_prims::ucx
