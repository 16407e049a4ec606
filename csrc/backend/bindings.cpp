// The Python module dist_prims._backend.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../core/kernels.h"
#include "backend.h"

namespace py = pybind11;

PYBIND11_MODULE(_backend, module) {
    using dist_prims::CommError;
    using dist_prims::PrimsBackend;
    module.doc() = "The backend of torch.distributed; see dist_prims.backend.";
    py::class_<PrimsBackend, c10d::Backend, c10::intrusive_ptr<PrimsBackend>>(module, "PrimsBackend")
        .def(py::init<const c10::intrusive_ptr<c10d::Store>&, int, int, std::chrono::milliseconds,
                      c10::intrusive_ptr<c10d::Backend>, bool, std::size_t>(),
             py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("engine"),
             py::arg("one_host"), py::arg("slot_bytes"), py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("native", &PrimsBackend::native);
    module.attr("built_for") = DIST_PRIMS_TORCH;
    module.def("instruction_set", &dist_prims::instruction_set);
    py::register_exception_translator([](std::exception_ptr error) {
        try {
            if (error) std::rethrow_exception(error);
        } catch (const CommError& found) {
            constexpr const char* kNames[] = {"MismatchError", "PeerDied", "PeerLeft", "CommTimeout", "Interrupted"};
            const py::object kind = py::module_::import("dist_prims.errors").attr(kNames[static_cast<int>(found.kind)]);
            PyErr_SetString(kind.ptr(), found.what());
        }
    });
}
