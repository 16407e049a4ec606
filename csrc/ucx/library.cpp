// The object behind the interface library.h. The adapter for torch loads this library, libdist_prims_ucx.so, by its
// path and gets the object from dist_prims_ucx_library(). close() runs at the exit of the process.
#include "library.h"

#include <algorithm>
#include <mutex>

#include "../common/process.h"
#include "calls.h"
#include "transport.h"

namespace dist_prims::ucx {
namespace {

// The transports of this process, which close() stops. A forked child must not stop its parent's transports.
class Transports {
public:
    void add(UcxTransport* transport) {
        const std::lock_guard lock(mutex_);
        all_.push_back(transport);
    }
    void remove(UcxTransport* transport) {
        const std::lock_guard lock(mutex_);
        std::erase(all_, transport);
    }
    void stop_all() {
        if (this_process() != owner_) return;
        const std::lock_guard lock(mutex_);
        for (UcxTransport* transport : all_) transport->stop();
    }

private:
    const int owner_ = this_process();
    std::mutex mutex_;
    std::vector<UcxTransport*> all_;
};

Transports& transports() {
    static auto& one = *new Transports;  // never destroyed: groups may end after the static objects
    return one;
}

class RegisteredTransport : public UcxTransport {
public:
    RegisteredTransport(std::unique_ptr<Worker> worker, Connections connections)
        : UcxTransport(std::move(worker), std::move(connections)) {
        transports().add(this);
    }
    ~RegisteredTransport() override { transports().remove(this); }
};

class WorkerEndpoint : public Endpoint {
public:
    explicit WorkerEndpoint(const Settings& settings) : worker_(std::make_unique<Worker>(settings)) {}
    std::string address() const override { return worker_->address(); }
    std::unique_ptr<Transport> connect(Connections connections) override {
        return std::make_unique<RegisteredTransport>(std::move(worker_), std::move(connections));
    }

private:
    std::unique_ptr<Worker> worker_;
};

class LoadedUcx : public UcxLibrary {
public:
    void load(const std::string& libucp) override { ucx::load(libucp); }
    std::string version() const override { return calls() ? calls()->get_version_string() : ""; }
    std::unique_ptr<Endpoint> make_endpoint(const Settings& settings) override {
        return std::make_unique<WorkerEndpoint>(settings);
    }
    void close() override { transports().stop_all(); }
};

}  // namespace
}  // namespace dist_prims::ucx

extern "C" __attribute__((visibility("default"))) dist_prims::ucx::UcxLibrary* dist_prims_ucx_library() {
    static dist_prims::ucx::LoadedUcx one;
    return &one;
}
