// The calls of UCX, resolved at run time.
//
// The headers may be newer than the library: a structure of UCX has a mask of the fields that its caller has set, and
// newer fields follow older ones. Only calls and fields of UCX 1.13 are used.
#pragma once

#include <ucp/api/ucp.h>

#include <string>

namespace dist_prims::ucx {

struct UcxCalls {
    static constexpr unsigned kMajor = 1, kMinor = 13;  // the oldest version that will do

    decltype(&::ucp_get_version) get_version;
    decltype(&::ucp_get_version_string) get_version_string;
    decltype(&::ucp_config_read) config_read;
    decltype(&::ucp_config_modify) config_modify;
    decltype(&::ucp_config_release) config_release;
    decltype(&::ucp_init_version) init_version;
    decltype(&::ucp_cleanup) cleanup;
    decltype(&::ucp_worker_create) worker_create;
    decltype(&::ucp_worker_destroy) worker_destroy;
    decltype(&::ucp_worker_get_address) worker_get_address;
    decltype(&::ucp_worker_release_address) worker_release_address;
    decltype(&::ucp_worker_get_efd) worker_get_efd;
    decltype(&::ucp_worker_arm) worker_arm;
    decltype(&::ucp_worker_progress) worker_progress;
    decltype(&::ucp_ep_create) ep_create;
    decltype(&::ucp_ep_flush_nbx) ep_flush_nbx;
    decltype(&::ucp_ep_close_nbx) ep_close_nbx;
    decltype(&::ucp_tag_send_nbx) tag_send_nbx;
    decltype(&::ucp_tag_recv_nbx) tag_recv_nbx;
    decltype(&::ucp_tag_probe_nb) tag_probe_nb;
    decltype(&::ucp_tag_msg_recv_nbx) tag_msg_recv_nbx;
    decltype(&::ucp_request_cancel) request_cancel;
    decltype(&::ucp_request_check_status) request_check_status;
    decltype(&::ucp_request_free) request_free;
    decltype(&::ucs_status_string) status_string;
};

// The calls of the library that load() has loaded; null before.
const UcxCalls* calls();
// Throws std::runtime_error. Loads a library once: a second call returns at once.
void load(const std::string& libucp);

// Throws std::runtime_error with the text of the status unless it is UCS_OK. `what` is the call.
void check(ucs_status_t status, const char* what);

}  // namespace dist_prims::ucx
