#include "calls.h"

#include <dlfcn.h>

#include <mutex>
#include <optional>
#include <stdexcept>

namespace dist_prims::ucx {
namespace {

std::mutex mutex;
std::optional<UcxCalls> loaded;

template <typename Function>
void resolve(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(library, name));  // also searches what the library depends on
    if (!function) throw std::runtime_error(std::string("it has no function ") + name);
}

UcxCalls resolve_all(void* library) {
    UcxCalls found{};
    resolve(library, "ucp_get_version", found.get_version);
    resolve(library, "ucp_get_version_string", found.get_version_string);
    resolve(library, "ucp_config_read", found.config_read);
    resolve(library, "ucp_config_modify", found.config_modify);
    resolve(library, "ucp_config_release", found.config_release);
    resolve(library, "ucp_init_version", found.init_version);
    resolve(library, "ucp_cleanup", found.cleanup);
    resolve(library, "ucp_worker_create", found.worker_create);
    resolve(library, "ucp_worker_destroy", found.worker_destroy);
    resolve(library, "ucp_worker_get_address", found.worker_get_address);
    resolve(library, "ucp_worker_release_address", found.worker_release_address);
    resolve(library, "ucp_worker_get_efd", found.worker_get_efd);
    resolve(library, "ucp_worker_arm", found.worker_arm);
    resolve(library, "ucp_worker_progress", found.worker_progress);
    resolve(library, "ucp_ep_create", found.ep_create);
    resolve(library, "ucp_ep_flush_nbx", found.ep_flush_nbx);
    resolve(library, "ucp_ep_close_nbx", found.ep_close_nbx);
    resolve(library, "ucp_tag_send_nbx", found.tag_send_nbx);
    resolve(library, "ucp_tag_recv_nbx", found.tag_recv_nbx);
    resolve(library, "ucp_tag_probe_nb", found.tag_probe_nb);
    resolve(library, "ucp_tag_msg_recv_nbx", found.tag_msg_recv_nbx);
    resolve(library, "ucp_request_cancel", found.request_cancel);
    resolve(library, "ucp_request_check_status", found.request_check_status);
    resolve(library, "ucp_request_free", found.request_free);
    resolve(library, "ucs_status_string", found.status_string);
    return found;
}

}  // namespace

const UcxCalls* calls() {
    return loaded ? &*loaded : nullptr;
}

void load(const std::string& libucp) {
    const std::lock_guard lock(mutex);
    if (loaded) return;
    void* const library = ::dlopen(libucp.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(::dlerror());
    const UcxCalls found = resolve_all(library);
    unsigned major = 0, minor = 0, release = 0;
    found.get_version(&major, &minor, &release);
    if (major != UcxCalls::kMajor || minor < UcxCalls::kMinor)
        throw std::runtime_error("it is UCX " + std::string(found.get_version_string()) +
                                 ", and 1.13 or a later 1.x is needed");
    loaded = found;
}

void check(ucs_status_t status, const char* what) {
    if (status != UCS_OK) throw std::runtime_error(std::string(what) + ": " + calls()->status_string(status));
}

}  // namespace dist_prims::ucx
