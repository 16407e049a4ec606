// The Python module dist_prims._backend.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../core/kernels.h"
#include "backend.h"
#include "gradual.h"

namespace py = pybind11;

namespace {

using namespace dist_prims;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// A plan in tuples: sends, receives and writes of each step.
using Messages = std::vector<std::tuple<int, Plan::Chunks, Plan::Chunks>>;
using Writes = std::vector<std::tuple<int, int, bool, std::vector<std::pair<int, int>>>>;
using Steps = std::vector<std::tuple<Messages, Messages, Writes>>;

std::vector<Plan::Message> messages_of(const Messages& given) {
    std::vector<Plan::Message> messages;
    for (const auto& [peer, chunks, pieces] : given) messages.push_back({peer, chunks, pieces});
    return messages;
}

Plan plan_of(int chunks, int scratch, const Steps& steps) {
    Plan plan{chunks, scratch, {}};
    for (const auto& [sends, receives, writes] : steps) {
        Plan::Step& step = plan.steps.emplace_back(Plan::Step{messages_of(sends), messages_of(receives), {}});
        for (const auto& [into, piece, copy, sources] : writes) {
            Plan::Write& write = step.writes.emplace_back(Plan::Write{into, piece, copy, {}});
            for (const auto& [peer, index] : sources) write.sources.push_back({peer, index});
        }
    }
    return plan;
}

// As Python says it: low, high, name, segments, chunks, scratch, steps.
using Told = std::tuple<std::uint64_t, std::uint64_t, std::string, int, int, int, Steps>;

Planned planned_of(const Told& told) {
    const auto& [low, high, name, segments, chunks, scratch, steps] = told;
    return {low, high, name, segments, plan_of(chunks, scratch, steps)};
}

c10::intrusive_ptr<PrimsBackend> make(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                      Milliseconds timeout, const std::vector<std::string>& hosts,
                                      const BackendPtr& engine, std::function<BackendPtr()> make_gloo,
                                      std::function<Told(std::string, std::uint64_t, int)> choose,
                                      const BackendPtr& accelerator, std::size_t slot_bytes, std::size_t one_shot_bytes,
                                      const std::string& group, const std::string& ranks, const std::string& dump) {
    Setup setup{
        .timeout = timeout,
        .hosts = hosts,
        .engine = engine,
        .make_gloo = std::move(make_gloo),
        .choose = [choose = std::move(choose)](const std::string& collective, std::uint64_t bytes,
                                               int root) { return planned_of(choose(collective, bytes, root)); },
        .accelerator = accelerator,
        .slot_bytes = slot_bytes,
        .one_shot_bytes = one_shot_bytes,
        .group = group,
        .ranks = ranks,
        .dump = dump};
    return c10::make_intrusive<PrimsBackend>(store, rank, size, std::move(setup));
}

void translate(std::exception_ptr error) {
    try {
        if (error) std::rethrow_exception(error);
    } catch (const CommError& found) {
        constexpr const char* kNames[] = {"MismatchError", "PeerDied",    "PeerLeft",
                                          "CommTimeout",   "Interrupted", "CommTimeout"};
        const py::object kind = py::module_::import("dist_prims.errors").attr(kNames[static_cast<int>(found.kind)]);
        PyErr_SetString(kind.ptr(), found.what());
    }
}

}  // namespace

PYBIND11_MODULE(_backend, module) {
    module.doc() = "The backend of torch.distributed; see dist_prims.backend.";
    using Free = py::call_guard<py::gil_scoped_release>;
    py::class_<PrimsBackend, c10d::Backend, c10::intrusive_ptr<PrimsBackend>>(module, "PrimsBackend")
        .def(py::init(&make), py::kw_only(), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
             py::arg("hosts"), py::arg("engine"), py::arg("make_gloo"), py::arg("choose"), py::arg("accelerator"),
             py::arg("slot_bytes"), py::arg("one_shot_bytes"), py::arg("group"), py::arg("ranks"), py::arg("dump"),
             Free())
        .def_property_readonly("spans_hosts", &PrimsBackend::spans_hosts)
        .def_property_readonly("engine", &PrimsBackend::engine)
        .def("algorithm", &PrimsBackend::algorithm, Free())
        .def(
            "pin",
            [](PrimsBackend& self, const std::vector<Told>& told) {
                std::vector<Planned> planned;
                for (const Told& each : told) planned.push_back(planned_of(each));
                self.pin(std::move(planned));
            },
            Free())
        .def(
            "all_reduce_",  // the plain operations as they come: a ReduceOp would be made of each by Python
            [](PrimsBackend& self, at::Tensor tensor, c10d::ReduceOp::RedOpType op) {
                self.all_reduce_now(std::move(tensor), op);
            },
            Free())
        .def("all_reduce_", &PrimsBackend::all_reduce_now, Free())
        .def("gradual", &GradualTensor::make, Free())
        .def("record", &PrimsBackend::record, Free());
    py::class_<GradualTensor, std::shared_ptr<GradualTensor>>(module, "GradualTensor")
        .def("put", &GradualTensor::put, Free())
        .def("all_reduce", &GradualTensor::all_reduce, Free())
        .def("forget", &GradualTensor::forget, Free())
        .def("held", &GradualTensor::held, Free())
        .def("is_shown", &GradualTensor::is_shown, Free());
    module.attr("built_for") = DIST_PRIMS_TORCH;
    module.def("instruction_set", &instruction_set);
    module.def(
        "empty",
        [](const std::vector<int64_t>& shape, at::ScalarType dtype) {
            return lent_tensor(shape, at::TensorOptions().dtype(dtype));
        },
        Free());
    py::register_exception_translator(translate);
}
