#include "library.h"

#include "group.h"
#include "mpi_state.h"
#include "progress.h"

namespace dist_prims::mpi {
namespace {

class LoadedLibrary : public Library {
public:
    std::string unusable() override { return mpi::unusable(); }
    std::shared_ptr<Group> make_group(const std::vector<int>& ranks, Milliseconds timeout,
                                      const WaitHook& look) override {
        return std::make_shared<MpiGroup>(ranks, timeout, look);
    }
    void close() override { Progress::instance().close(); }
};

}  // namespace
}  // namespace dist_prims::mpi

extern "C" __attribute__((visibility("default"))) dist_prims::mpi::Library* dist_prims_mpi_library() {
    static dist_prims::mpi::LoadedLibrary one;
    return &one;
}
