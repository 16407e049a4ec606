#include "bindings.h"

#include <dlfcn.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "../../mpi/library.h"
#include "../backend/group_setup.h"
#include "../common/work.h"

namespace dist_prims::mpi {
namespace {

namespace py = pybind11;

// The MPI library of this process. Its symbols of MPI are resolved here, by the library that mpi4py has loaded.
class MpiLibraryBinding {
public:
    explicit MpiLibraryBinding(const std::string& path) {
        void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        void* function = handle ? ::dlsym(handle, kGetLibrary) : nullptr;
        if (!function) throw py::import_error(::dlerror());
        library_ = reinterpret_cast<GetLibrary*>(function)();
    }
    std::string unusable() const { return library_->unusable(); }
    void close() const { library_->close(); }
    std::shared_ptr<MpiEndpoint> make(const std::vector<int>& ranks, Milliseconds timeout,
                                      std::size_t largest_count) const {
        try {
            return std::make_shared<MpiEndpoint>(
                MpiEndpoint{library_->make_transport({ranks, timeout, largest_count}, check_signals)});
        } catch (const MissingRanksError& error) {
            throw CommError(CommError::Kind::kTimeout, error.what());
        } catch (const Transport::TransportError& error) {
            throw CommError(CommError::Kind::kUnreachable, error.what());
        }
    }

private:
    MpiLibrary* library_;
};

}  // namespace

void bind(py::module_& module) {
    using Free = py::call_guard<py::gil_scoped_release>;
    py::class_<MpiEndpoint, std::shared_ptr<MpiEndpoint>>(module, "MpiEndpoint");
    py::class_<MpiLibraryBinding>(module, "MpiLibrary")
        .def(py::init<const std::string&>())
        .def("unusable", &MpiLibraryBinding::unusable)
        .def("close", &MpiLibraryBinding::close, Free())
        .def("make", &MpiLibraryBinding::make, py::kw_only(), py::arg("ranks"), py::arg("timeout"),
             py::arg("largest_count"), Free());
}

}  // namespace dist_prims::mpi
