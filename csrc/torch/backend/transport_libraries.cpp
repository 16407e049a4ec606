#include "transport_libraries.h"

#include <dlfcn.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "../../mpi/library.h"
#include "../../ucx/library.h"
#include "../common/python_signals.h"
#include "group_setup.h"

namespace dist_prims {
namespace {

namespace py = pybind11;

// Loads the file, and returns the library that its function of this name returns.
template <typename GetLibrary>
auto* load_library(const std::string& path, const char* function_name) {
    void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    void* const function = handle ? ::dlsym(handle, function_name) : nullptr;
    if (!function) throw py::import_error(::dlerror());
    return reinterpret_cast<GetLibrary*>(function)();
}

// See dist_prims.backend.mpi_library. The symbols of MPI are resolved here, by the library that mpi4py has loaded.
class MpiLibraryBinding {
public:
    explicit MpiLibraryBinding(const std::string& path)
        : library_(load_library<mpi::GetLibrary>(path, mpi::kGetLibrary)) {}
    std::string unusable() const { return library_->unusable(); }
    void close() const { library_->close(); }
    std::shared_ptr<MpiEndpoint> make(const std::vector<int>& ranks, Milliseconds timeout,
                                      std::size_t largest_count) const {
        try {
            return std::make_shared<MpiEndpoint>(
                MpiEndpoint{library_->make_transport({ranks, timeout, largest_count}, run_python_signal_handlers)});
        } catch (const mpi::MissingRanksError& error) {
            throw CommError(CommError::Kind::kTimeout, error.what());
        } catch (const Transport::TransportError& error) {
            throw CommError(CommError::Kind::kUnreachable, error.what());
        }
    }

private:
    mpi::MpiLibrary* const library_;
};

// See dist_prims.backend.ucx_library. The library of csrc/ucx loads UCX itself, from the path `libucp`.
class UcxLibraryBinding {
public:
    UcxLibraryBinding(const std::string& path, const std::string& libucp)
        : library_(load_library<ucx::GetLibrary>(path, ucx::kGetLibrary)) {
        library_->load(libucp);
    }
    std::string version() const { return library_->version(); }
    void close() const { library_->close(); }
    std::shared_ptr<UcxEndpoint> make(const ucx::Settings& settings) const {
        return std::make_shared<UcxEndpoint>(UcxEndpoint{library_->make_endpoint(settings)});
    }

private:
    ucx::UcxLibrary* const library_;
};

}  // namespace

void bind_transport_libraries(py::module_& module) {
    using Free = py::call_guard<py::gil_scoped_release>;
    py::class_<MpiEndpoint, std::shared_ptr<MpiEndpoint>>(module, "MpiEndpoint");
    py::class_<MpiLibraryBinding>(module, "MpiLibrary")
        .def(py::init<const std::string&>())
        .def("unusable", &MpiLibraryBinding::unusable)
        .def("close", &MpiLibraryBinding::close, Free())
        .def("make", &MpiLibraryBinding::make, py::kw_only(), py::arg("ranks"), py::arg("timeout"),
             py::arg("largest_count"), Free());
    py::class_<UcxEndpoint, std::shared_ptr<UcxEndpoint>>(module, "UcxEndpoint")
        .def_property_readonly("address", [](const UcxEndpoint& self) { return py::bytes(self.own->address()); })
        .def_property("addresses", nullptr, [](UcxEndpoint& self, const std::vector<py::bytes>& addresses) {
            self.addresses = {addresses.begin(), addresses.end()};
        });
    py::class_<UcxLibraryBinding>(module, "UcxLibrary")
        .def(py::init<const std::string&, const std::string&>())
        .def_property_readonly("version", &UcxLibraryBinding::version)
        .def("close", &UcxLibraryBinding::close, Free())
        .def("make", &UcxLibraryBinding::make, Free());
}

}  // namespace dist_prims
