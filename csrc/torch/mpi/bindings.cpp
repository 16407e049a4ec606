// The Python module dist_prims._mpi_mpich, or _mpi_openmpi: one for each way in which MPI's handles are made.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "../common/work.h"
#include "backend.h"
#include "../../mpi/progress.h"

namespace py = pybind11;

namespace {

using namespace dist_prims;
using mpi::MpiBackend;

c10::intrusive_ptr<MpiBackend> make(const std::vector<int>& ranks, mpi::Milliseconds timeout,
                                    std::size_t largest_count) {
    auto group = std::make_shared<mpi::Group>(ranks, timeout, check_signals);
    return c10::make_intrusive<MpiBackend>(std::move(group), timeout, largest_count);
}

void translate(std::exception_ptr error) {
    try {
        if (error) std::rethrow_exception(error);
    } catch (const mpi::Error& found) {
        const char* name = found.is_timeout ? "CommTimeoutError" : "CommError";
        const py::object kind = py::module_::import("dist_prims.errors").attr(name);
        PyErr_SetString(kind.ptr(), found.what());
    }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.doc() = "A backend of torch.distributed over MPI; see dist_prims.backend.mpi_library.";
    using Free = py::call_guard<py::gil_scoped_release>;
    py::class_<MpiBackend, c10d::Backend, c10::intrusive_ptr<MpiBackend>>(module, "MpiBackend")
        .def(py::init(&make), py::kw_only(), py::arg("ranks"), py::arg("timeout"), py::arg("largest_count"), Free())
        .def_property_readonly("largest_tag", &MpiBackend::largest_tag);
    module.attr("built_for") = DIST_PRIMS_TORCH;
    module.def("unusable", &mpi::unusable);
    module.def("close", [] { mpi::Progress::instance().close(); }, Free());
    py::register_exception_translator(translate);
}
