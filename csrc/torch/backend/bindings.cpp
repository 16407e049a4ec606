// The Python module _backend of an adapter, which dist_prims/backend/torch_adapter.py loads: PrimsBackend and the
// classes that its setup needs. Functions with the guard Free run without the GIL.
#include <ATen/Parallel.h>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../../common/core_share.h"
#include "../common/python_use.h"
#include "backend.h"
#include "direct_calls.h"
#include "incremental_tensor.h"
#include "signed_store.h"
#include "transport_libraries.h"

namespace py = pybind11;

namespace {

using namespace dist_prims;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// An attribute of a Python object as a C++ value.
template <class T>
T field(const py::handle& object, const char* name) {
    return object.attr(name).cast<T>();
}

// These four copy the dataclasses of dist_prims/schedules/program.py, whose fields have the same names in C++.
std::vector<RankProgram::Message> messages_of(const py::object& list) {
    std::vector<RankProgram::Message> messages;
    for (const py::handle message : list)
        messages.push_back({field<int>(message, "peer"), field<RankProgram::Chunks>(message, "chunks"),
                            field<RankProgram::Chunks>(message, "pieces")});
    return messages;
}

std::vector<RankProgram::Write> writes_of(const py::object& list) {
    std::vector<RankProgram::Write> writes;
    for (const py::handle write : list) {
        std::vector<RankProgram::Source> sources;
        for (const py::handle source : write.attr("sources"))
            sources.push_back({field<int>(source, "peer"), field<int>(source, "index")});
        writes.push_back({field<int>(write, "into"), field<int>(write, "piece"), field<bool>(write, "copy"),
                          std::move(sources), field<std::vector<int>>(write, "terms")});
    }
    return writes;
}

RankProgram program_of(const py::object& from) {
    RankProgram program{
        .chunks = field<int>(from, "chunks"),
        .scratch = field<int>(from, "scratch"),
        .steps = {},
        .ranks = field<int>(from, "ranks"),
    };
    for (const py::handle step : from.attr("steps"))
        program.steps.push_back(
            {messages_of(step.attr("sends")), messages_of(step.attr("receives")), writes_of(step.attr("writes"))});
    return program;
}

NativeSchedule schedule_of(const py::handle& from) {
    return {
        .low = field<std::uint64_t>(from, "low"),
        .high = field<std::uint64_t>(from, "high"),
        .name = field<std::string>(from, "name"),
        .segments = field<int>(from, "segments"),
        .program = program_of(from.attr("program")),
        .is_slower_than_piggyback = field<bool>(from, "is_slower_than_piggyback"),
    };
}

// A RankSchedule that a function of Python's returns: a type of its own, so that pybind11 copies it by schedule_of().
struct ReturnedSchedule : NativeSchedule {};

}  // namespace

template <>
struct py::detail::type_caster<ReturnedSchedule> {
    PYBIND11_TYPE_CASTER(ReturnedSchedule, const_name("RankSchedule"));
    bool load(const handle& source, bool /*convert*/) {
        static_cast<NativeSchedule&>(value) = schedule_of(source);
        return true;
    }
};

namespace {

// Python's functions that choose a schedule, and that make the pinned schedules for a root.
using Choose = std::function<ReturnedSchedule(std::string, std::uint64_t, int, bool)>;
using MakePinned = std::function<std::vector<ReturnedSchedule>(int)>;

// Python's functions that make the backend of another group: by split or merge, of survivors, of other members.
using MakeChild =
    std::function<BackendPtr(c10::intrusive_ptr<c10d::Store>, std::string, int, int, Milliseconds, std::vector<int>)>;
using Shrink = std::function<BackendPtr(c10::intrusive_ptr<PrimsBackend>, std::vector<int>)>;
using Reconfigure = std::function<BackendPtr(c10::intrusive_ptr<PrimsBackend>, std::int64_t, std::string,
                                             std::vector<std::string>, bool, Milliseconds)>;

// Python's function that describes the group. Its argument: alpha (seconds) and beta (seconds per byte) of the link
// between hosts, or None.
using Describe = std::function<std::string(std::optional<std::pair<double, double>>)>;

// Reads dist_prims/backend/group_setup.py: values, and functions that this side calls.
Setup read_setup(const py::object& setup, Milliseconds timeout) {
    return {
        .timeout = timeout,
        .hosts = field<std::vector<std::string>>(setup, "host_names"),
        .mpi = field<std::shared_ptr<MpiEndpoint>>(setup, "mpi"),
        .tcp = field<std::shared_ptr<TcpEndpoint>>(setup, "tcp"),
        .ucx = field<std::shared_ptr<UcxEndpoint>>(setup, "ucx"),
        .make_gloo = field<std::function<BackendPtr()>>(setup, "make_gloo"),
        .make_child =
            [make = field<MakeChild>(setup, "make_child")](const ChildGroup& child) {
                return make(child.store, child.name, child.rank, child.size, child.timeout, child.ranks);
            },
        .make_shrunk =
            [shrink = field<Shrink>(setup, "shrink")](PrimsBackend& from, const std::vector<int>& excluded) {
                return shrink(c10::intrusive_ptr<PrimsBackend>::reclaim_copy(&from), excluded);
            },
        .make_handle = field<std::function<std::string(int)>>(setup, "make_handle"),
        .make_reconfigured =
            [reconfigure = field<Reconfigure>(setup, "reconfigure")](PrimsBackend& from, const Reconfiguration& to) {
                return reconfigure(c10::intrusive_ptr<PrimsBackend>::reclaim_copy(&from), to.uuid, to.own, to.handles,
                                   to.is_ordered, to.timeout);
            },
        .choose = field<Choose>(setup, "choose"),
        .network = field<std::uint64_t>(setup, "network"),
        .nccl = field<BackendPtr>(setup, "nccl"),
        .slot_bytes = field<std::size_t>(setup, "slot_bytes"),
        .one_shot_bytes = field<std::size_t>(setup, "one_shot_bytes"),
        .group = field<std::string>(setup, "name"),
        .ranks = field<std::vector<uint64_t>>(setup, "ranks"),
        .describe =
            [describe = field<Describe>(setup, "describe")](const LinkCosts& link) {
                return describe(link.beta > 0 ? std::optional(std::pair(link.alpha, link.beta)) : std::nullopt);
            },
        .dump = field<std::string>(setup, "dump"),
    };
}

c10::intrusive_ptr<PrimsBackend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                              Milliseconds timeout, const py::object& setup,
                                              const std::function<int()>& ended) {
    Setup native_setup = read_setup(setup, timeout);
    const py::gil_scoped_release released;
    return c10::make_intrusive<PrimsBackend>(store, rank, size, std::move(native_setup), ended);
}

void pin(PrimsBackend& self, const std::string& collective, const std::string& text, MakePinned make) {
    if (!make) return self.pin(collective_of(collective), text, nullptr);
    self.pin(collective_of(collective), text, [make = std::move(make)](int root) {
        std::vector<NativeSchedule> schedules;
        for (ReturnedSchedule& schedule : make(root)) schedules.push_back(std::move(schedule));
        return schedules;
    });
}

// None becomes an undefined tensor.
Tensors tensors_of(const std::vector<std::optional<at::Tensor>>& list) {
    Tensors tensors;
    for (const auto& tensor : list) tensors.push_back(tensor.value_or(at::Tensor()));
    return tensors;
}

// Every wait for an asynchronous call raises its exception. pybind11's exception can be raised only once, so this turns
// it into torch's, which can be raised any number of times.
std::function<void()> raise_repeatedly(std::function<void()> call) {
    if (!call) return call;
    return [call = std::move(call)] {
        const PythonUse use;
        if (!use.wait_until_decided()) throw std::runtime_error("Python has ended before this call could be checked");
        try {
            call();
        } catch (py::error_already_set& error) {
            const py::gil_scoped_acquire gil;
            error.restore();
            python_error lasting;
            lasting.persist();
            throw lasting;
        }
    };
}

// What the ranks agree on if the caller has named a schedule: all lengths, but in an all_to_all only if the blocks of
// each rank have one length (`is_even`).
void announce_schedule(CollectiveCall& call, bool is_even) {
    Call& announced = call.announced;
    call.is_variable_length = announced.collective == Collective::kAllToAll;
    announced.count = sum_of(call.counts);
    announced.layout = call.counts.size() > 1 && !call.is_variable_length ? checksum_of(call.counts) : 0;
    if (call.is_variable_length) announced.count = is_even ? announced.count / 2 : 0;
}

// Runs a call of dist_prims.collectives, which has checked the arguments.
//
// Args:
//     schedule: null: the group chooses.
//     inputs, outputs, counts: by block; see CollectiveCall.
//     op: null: the collective does not reduce.
//     is_even: with a schedule, whether all blocks of each rank have one length.
//     check: see CollectiveCall; may be null.
WorkPtr run_call(PrimsBackend& self, const std::string& name, const std::shared_ptr<NativeSchedule>& schedule,
                 const std::vector<std::optional<at::Tensor>>& inputs,
                 const std::vector<std::optional<at::Tensor>>& outputs, const Counts& counts,
                 std::optional<c10d::ReduceOp::RedOpType> op, int root, bool is_even, std::function<void()> check,
                 bool async_op) {
    const Collective collective = collective_of(name);
    Tensors input_blocks = tensors_of(inputs), output_blocks = tensors_of(outputs);
    const at::Tensor like = first_defined(input_blocks, output_blocks);
    c10d::ReduceOp reduction;
    reduction.op_ = op.value_or(c10d::ReduceOp::SUM);  // also PREMUL_SUM: the inputs are multiplied
    const Op kind = op ? checked_op(name_of(collective), reduction, like) : Op::kNone;
    CollectiveCall call =
        call_of_blocks(collective, like, std::move(input_blocks), std::move(output_blocks), counts, kind, root);
    if (schedule)
        announce_schedule(call, is_even);
    else if (collective == Collective::kBarrier)
        call.announced = {};
    call.schedule = schedule;
    call.check = raise_repeatedly(std::move(check));
    return self.run_call(std::move(call), async_op);
}

// Raises the errors of this library as the exceptions of dist_prims/errors.py.
void set_python_exception(std::exception_ptr error) {
    try {
        if (error) std::rethrow_exception(error);
    } catch (python_error& failure) {
        failure.restore();
    } catch (const CommError& failure) {
        constexpr const char* kNames[] = {
            // by CommError::Kind
            "MismatchError",    "PeerDiedError", "PeerLeftError", "CommTimeoutError", "CommInterruptedError",
            "CommTimeoutError", "CommError",     "CommError",     "CommTimeoutError"};
        const py::object kind = py::module_::import("dist_prims.errors").attr(kNames[static_cast<int>(failure.kind)]);
        PyErr_SetString(kind.ptr(), failure.what());
    }
}

}  // namespace

PYBIND11_MODULE(_backend, module) {
    module.doc() = "The backend of torch.distributed; see dist_prims.backend.";
    using Free = py::call_guard<py::gil_scoped_release>;
    py::class_<PrimsBackend, c10d::Backend, c10::intrusive_ptr<PrimsBackend>>(module, "PrimsBackend")
        .def(py::init(&make_backend), py::kw_only(), py::arg("store"), py::arg("rank"), py::arg("size"),
             py::arg("timeout"), py::arg("setup"), py::arg("ended"))
        .def_property_readonly("spans_hosts", &PrimsBackend::spans_hosts)
        .def_property_readonly("transport", &PrimsBackend::transport)
        .def_property_readonly("options", &PrimsBackend::getBackendOptions)
        // torch calls it on the ranks outside of a new group, for ncclCommSplit. A split of this backend needs no call.
        .def("perform_nocolor_split", [](PrimsBackend&, const py::object& /*device*/) {})
        .def("ended", &PrimsBackend::ended, Free())
#ifdef C10D_BACKEND_HAS_RECONFIGURE
        .def("await_members", &PrimsBackend::await_members, py::arg("rank"), py::arg("size"))
        .def_property_readonly("awaits_members", &PrimsBackend::awaits_members)
        .def("use_uuid", &PrimsBackend::use_uuid, py::arg("uuid"))
#endif
        .def("set_timeout", &PrimsBackend::setTimeout, Free())
        .def("end_on_all_hosts", &PrimsBackend::end_on_all_hosts, Free())
        .def("named_ranks", &PrimsBackend::named_ranks, Free())
        .def("doubtful_ranks", &PrimsBackend::doubtful_ranks, Free())
        .def("cut_links", &PrimsBackend::cut_links, Free())
        .def("number_from", &PrimsBackend::number_from, py::arg("first"))
        .def(
            "append_to_log", [](PrimsBackend& self, const std::string& text) { self.log().append(text); },
            py::arg("text"), Free())
        .def(
            "read_log", [](PrimsBackend& self) { return self.log().read(); }, Free())
        .def(
            "algorithm",
            [](PrimsBackend& self, std::uint64_t bytes, const std::string& collective, int root) {
                return self.algorithm(bytes, collective_of(collective), root);
            },
            py::arg("nbytes"), py::arg("collective") = "all_reduce", py::arg("root") = -1, Free())
        .def("pin", &pin, py::arg("collective"), py::arg("text"), py::arg("make"), Free())
        .def("run_call", &run_call, py::kw_only(), py::arg("collective"), py::arg("schedule"), py::arg("inputs"),
             py::arg("outputs"), py::arg("counts"), py::arg("op"), py::arg("root"), py::arg("is_even"),
             py::arg("check"), py::arg("async_op"), Free())
        .def("incremental_reduce", &IncrementalTensor::make, Free())
        .def("record", &PrimsBackend::record, Free());
    bind_direct_calls(module);
    py::class_<TcpEndpoint, std::shared_ptr<TcpEndpoint>>(module, "TcpEndpoint")
        .def(py::init([](int listening) { return std::make_shared<TcpEndpoint>(TcpEndpoint{Socket(listening)}); }))
        .def_readwrite("addresses", &TcpEndpoint::addresses)
        .def_readwrite("key", &TcpEndpoint::key)
        .def_readwrite("polls", &TcpEndpoint::polls);
    py::class_<SignedStore, c10d::Store, c10::intrusive_ptr<SignedStore>>(module, "SignedStore")
        .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, const py::bytes& key) {
                 return c10::make_intrusive<SignedStore>(store, std::string(key));
             }),
             py::arg("store"), py::arg("key"));
    py::class_<NativeSchedule, std::shared_ptr<NativeSchedule>>(module, "NativeSchedule")
        .def(py::init([](const py::object& from) { return std::make_shared<NativeSchedule>(schedule_of(from)); }));
    py::class_<IncrementalTensor, std::shared_ptr<IncrementalTensor>>(module, "IncrementalTensor")
        .def("put", &IncrementalTensor::put, Free())
        .def("all_reduce", &IncrementalTensor::all_reduce, Free())
        .def("forget", &IncrementalTensor::discard, Free())
        .def("held", &IncrementalTensor::deferred_bytes, Free())
        .def("is_shown", &IncrementalTensor::is_published, Free());
    name_dtypes();
    set_program_threads(&at::get_num_threads);
    bind_transport_libraries(module);
    module.attr("built_for") = BUILT_FOR_TORCH;
    module.def("run_exit_actions", &run_exit_actions, Free());
    module.def("end_python_use", &end_python_use, Free());
    module.def(
        "empty", [](const std::vector<int64_t>& shape, at::ScalarType dtype) { return shared_tensor(shape, dtype); },
        Free());
    py::register_exception_translator(set_python_exception);
}
