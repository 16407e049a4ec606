// The interface between the backend and UCX, without the headers of UCX.
//
// The sources of this folder make a library of their own, which is linked to no UCX: it loads the libucp that Python
// has found in this environment (see dist_prims/backend/ucx_library.py) and resolves the calls it needs, which
// UCX 1.13 has.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../net/transport.h"
#include "../tcp/transport.h"

namespace dist_prims::ucx {

// What a rank needs to connect its worker to the other ranks' workers.
struct Connections {
    std::vector<std::string> addresses{};  // of the workers of all ranks, by rank
    TcpEndpoint tcp{};                     // for notices and diagnosis
    int rank = 0;
};

// The worker of a rank, before it knows the other ranks.
class Endpoint {
public:
    virtual ~Endpoint() = default;
    // The address of the worker: binary data.
    virtual std::string address() const = 0;
    // Called once.
    virtual std::unique_ptr<Transport> connect(Connections connections) = 0;
};

// Settings of UCX as names and values, such as {"TLS", "tcp"}.
using Settings = std::vector<std::pair<std::string, std::string>>;

// The UCX of this process.
class UcxLibrary {
public:
    virtual ~UcxLibrary() = default;
    // Loads the libucp of this path or name. Throws std::runtime_error if that fails, or if it is too old.
    virtual void load(const std::string& libucp) = 0;
    virtual std::string version() const = 0;
    virtual std::unique_ptr<Endpoint> make_endpoint(const Settings& settings) = 0;
    // Closes all transports, before the process ends: UCX must not be called when its own destructors have run.
    virtual void close() = 0;
};

// The function that the library exports under this name. The object lives as long as the process.
using GetLibrary = UcxLibrary*();
constexpr const char* kGetLibrary = "dist_prims_ucx_library";

}  // namespace dist_prims::ucx
