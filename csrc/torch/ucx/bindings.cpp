#include "bindings.h"

#include <dlfcn.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "../../ucx/library.h"
#include "../backend/group_setup.h"

namespace dist_prims::ucx {
namespace {

namespace py = pybind11;

// The library for UCX of this package, which loads UCX itself.
class UcxLibraryBinding {
public:
    UcxLibraryBinding(const std::string& path, const std::string& libucp) {
        void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        void* function = handle ? ::dlsym(handle, kGetLibrary) : nullptr;
        if (!function) throw py::import_error(::dlerror());
        library_ = reinterpret_cast<GetLibrary*>(function)();
        library_->load(libucp);
    }
    std::string version() const { return library_->version(); }
    void close() const { library_->close(); }
    std::shared_ptr<UcxEndpoint> make(const Settings& settings) const {
        return std::make_shared<UcxEndpoint>(UcxEndpoint{library_->make_endpoint(settings)});
    }

private:
    UcxLibrary* library_;
};

}  // namespace

void bind(py::module_& module) {
    using Free = py::call_guard<py::gil_scoped_release>;
    py::class_<UcxEndpoint, std::shared_ptr<UcxEndpoint>>(module, "UcxEndpoint")
        .def_property_readonly("address", [](const UcxEndpoint& self) { return py::bytes(self.own->address()); })
        .def_property("addresses", nullptr, [](UcxEndpoint& self, const std::vector<py::bytes>& given) {
            self.addresses = {given.begin(), given.end()};
        });
    py::class_<UcxLibraryBinding>(module, "UcxLibrary")
        .def(py::init<const std::string&, const std::string&>())
        .def_property_readonly("version", &UcxLibraryBinding::version)
        .def("close", &UcxLibraryBinding::close, Free())
        .def("make", &UcxLibraryBinding::make, Free());
}

}  // namespace dist_prims::ucx
