#include "library.h"

#include "mpi_state.h"
#include "progress.h"
#include "transport.h"

namespace dist_prims::mpi {
namespace {

class LoadedLibrary : public MpiLibrary {
public:
    std::string unusable() override { return mpi::unusable(); }
    std::unique_ptr<Transport> make_transport(const CommunicatorOptions& options, const WaitHook& wait_hook) override {
        return std::make_unique<MpiTransport>(std::make_shared<Communicator>(options, wait_hook));
    }
    void close() override { Progress::instance().close(); }
};

}  // namespace
}  // namespace dist_prims::mpi

extern "C" __attribute__((visibility("default"))) dist_prims::mpi::MpiLibrary* dist_prims_mpi_library() {
    static dist_prims::mpi::LoadedLibrary one;
    return &one;
}
