#include "bindings.h"

#include <dlfcn.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "../../mpi/library.h"
#include "../common/work.h"
#include "backend.h"

namespace dist_prims::mpi {
namespace {

namespace py = pybind11;

// The MPI library of this process. Its symbols of MPI are resolved here, by the library that mpi4py has loaded.
class MpiLibrary {
public:
    explicit MpiLibrary(const std::string& path) {
        void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        void* function = handle ? ::dlsym(handle, kGetLibrary) : nullptr;
        if (!function) throw py::import_error(::dlerror());
        library_ = reinterpret_cast<GetLibrary*>(function)();
    }
    std::string unusable() const { return library_->unusable(); }
    void close() const { library_->close(); }
    c10::intrusive_ptr<MpiBackend> make(const std::vector<int>& ranks, Milliseconds timeout,
                                        std::size_t largest_count) const {
        return c10::make_intrusive<MpiBackend>(library_->make_group(ranks, timeout, check_signals), timeout,
                                               largest_count);
    }

private:
    Library* library_;
};

void translate(std::exception_ptr error) {
    try {
        if (error) std::rethrow_exception(error);
    } catch (const Error& found) {
        const char* name = found.is_timeout ? "CommTimeoutError" : "CommError";
        const py::object kind = py::module_::import("dist_prims.errors").attr(name);
        PyErr_SetString(kind.ptr(), found.what());
    }
}

}  // namespace

void bind(py::module_& module) {
    using Free = py::call_guard<py::gil_scoped_release>;
    py::class_<MpiBackend, c10d::Backend, c10::intrusive_ptr<MpiBackend>>(module, "MpiBackend")
        .def_property_readonly("largest_tag", &MpiBackend::largest_tag);
    py::class_<MpiLibrary>(module, "MpiLibrary")
        .def(py::init<const std::string&>())
        .def("unusable", &MpiLibrary::unusable)
        .def("close", &MpiLibrary::close, Free())
        .def("make", &MpiLibrary::make, py::kw_only(), py::arg("ranks"), py::arg("timeout"), py::arg("largest_count"),
             Free());
    py::register_exception_translator(translate);
}

}  // namespace dist_prims::mpi
