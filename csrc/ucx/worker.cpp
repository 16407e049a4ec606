#include "worker.h"

#include <memory>

namespace dist_prims::ucx {

Worker::Worker(const Settings& settings) {
    ucp_config_t* config = nullptr;
    check(calls()->config_read(nullptr, nullptr, &config), "ucp_config_read()");
    const std::unique_ptr<ucp_config_t, void (*)(ucp_config_t*)> owner(config, calls()->config_release);
    for (const auto& [name, value] : settings) {  // an old UCX may lack one
        const ucs_status_t status = calls()->config_modify(config, name.c_str(), value.c_str());
        if (status != UCS_ERR_NO_ELEM) check(status, ("ucp_config_modify(" + name + "=" + value + ")").c_str());
    }
    ucp_params_t parameters{};
    parameters.field_mask = UCP_PARAM_FIELD_FEATURES;
    parameters.features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP;
    check(calls()->init_version(UcxCalls::kMajor, UcxCalls::kMinor, &parameters, config, &context_), "ucp_init()");
    try {
        create_worker();
    } catch (...) {
        if (worker_) calls()->worker_destroy(worker_);
        calls()->cleanup(context_);
        throw;
    }
}

void Worker::create_worker() {
    ucp_worker_params_t parameters{};
    parameters.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_EVENTS;
    parameters.thread_mode = UCS_THREAD_MODE_SERIALIZED;
    parameters.events = UCP_WAKEUP_TAG_SEND | UCP_WAKEUP_TAG_RECV | UCP_WAKEUP_TX | UCP_WAKEUP_RX;
    check(calls()->worker_create(context_, &parameters, &worker_), "ucp_worker_create()");
    check(calls()->worker_get_efd(worker_, &descriptor_), "ucp_worker_get_efd()");
}

Worker::~Worker() {
    calls()->worker_destroy(worker_);
    calls()->cleanup(context_);
}

std::string Worker::address() const {
    ucp_address_t* address = nullptr;
    std::size_t bytes = 0;
    check(calls()->worker_get_address(worker_, &address, &bytes), "ucp_worker_get_address()");
    std::string copy(reinterpret_cast<const char*>(address), bytes);
    calls()->worker_release_address(worker_, address);
    return copy;
}

}  // namespace dist_prims::ucx
