#include "calls.h"

#include <dlfcn.h>

#include <mutex>
#include <optional>
#include <stdexcept>

namespace dist_prims::ucx {
namespace {

std::mutex load_lock;
std::optional<UcxCalls> loaded;

template <typename Function>
void resolve(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(library, name));  // also searches what the library depends on
    if (!function) throw std::runtime_error(std::string("it has no function ") + name);
}

UcxCalls resolve_all(void* library) {
    UcxCalls resolved{};
    resolve(library, "ucp_get_version", resolved.get_version);
    resolve(library, "ucp_get_version_string", resolved.get_version_string);
    resolve(library, "ucp_config_read", resolved.config_read);
    resolve(library, "ucp_config_modify", resolved.config_modify);
    resolve(library, "ucp_config_release", resolved.config_release);
    resolve(library, "ucp_init_version", resolved.init_version);
    resolve(library, "ucp_cleanup", resolved.cleanup);
    resolve(library, "ucp_worker_create", resolved.worker_create);
    resolve(library, "ucp_worker_destroy", resolved.worker_destroy);
    resolve(library, "ucp_worker_get_address", resolved.worker_get_address);
    resolve(library, "ucp_worker_release_address", resolved.worker_release_address);
    resolve(library, "ucp_worker_get_efd", resolved.worker_get_efd);
    resolve(library, "ucp_worker_arm", resolved.worker_arm);
    resolve(library, "ucp_worker_progress", resolved.worker_progress);
    resolve(library, "ucp_ep_create", resolved.ep_create);
    resolve(library, "ucp_ep_flush_nbx", resolved.ep_flush_nbx);
    resolve(library, "ucp_ep_close_nbx", resolved.ep_close_nbx);
    resolve(library, "ucp_tag_send_nbx", resolved.tag_send_nbx);
    resolve(library, "ucp_tag_recv_nbx", resolved.tag_recv_nbx);
    resolve(library, "ucp_tag_probe_nb", resolved.tag_probe_nb);
    resolve(library, "ucp_tag_msg_recv_nbx", resolved.tag_msg_recv_nbx);
    resolve(library, "ucp_request_cancel", resolved.request_cancel);
    resolve(library, "ucp_request_check_status", resolved.request_check_status);
    resolve(library, "ucp_request_free", resolved.request_free);
    resolve(library, "ucs_status_string", resolved.status_string);
    return resolved;
}

}  // namespace

const UcxCalls* calls() {
    return loaded ? &*loaded : nullptr;
}

void load(const std::string& libucp) {
    const std::lock_guard lock(load_lock);
    if (loaded) return;
    void* const library = ::dlopen(libucp.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(::dlerror());
    const UcxCalls resolved = resolve_all(library);
    unsigned major = 0, minor = 0, release = 0;
    resolved.get_version(&major, &minor, &release);
    if (major != UcxCalls::kMajor || minor < UcxCalls::kMinor)
        throw std::runtime_error("it is UCX " + std::string(resolved.get_version_string()) +
                                 ", and 1.13 or a later 1.x is needed");
    loaded = resolved;
}

void check(ucs_status_t status, const char* what) {
    if (status != UCS_OK) throw std::runtime_error(std::string(what) + ": " + calls()->status_string(status));
}

}  // namespace dist_prims::ucx
