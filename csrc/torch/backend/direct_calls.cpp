// The functions use Python's C interface: pybind11 packs the arguments into a tuple and looks up the class of each,
// which takes longer than the exchange between two ranks. torch.distributed takes 5 us before it calls a backend.
#include "direct_calls.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "backend.h"

namespace py = pybind11;

namespace dist_prims {
namespace {

// The reduction of a Python object; nullopt for a name, and for a PREMUL_SUM without its factor. Throws TypeError for
// another object.
std::optional<c10d::ReduceOp> reduction_of(const char* what, py::handle object) {
    using Kind = c10d::ReduceOp::RedOpType;
    static const py::handle kind_class = py::type::of(py::cast(Kind::SUM)).release();
    static const py::handle sum = py::object(kind_class.attr("SUM")).release();
    if (object.is(sum)) return c10d::ReduceOp(Kind::SUM);  // without a cast, for the shortest calls
    if (py::type::handle_of(object).is(kind_class)) {
        const auto kind = py::cast<Kind>(object);
        return kind == Kind::PREMUL_SUM ? std::nullopt : std::optional(c10d::ReduceOp(kind));
    }
    if (py::isinstance<py::str>(object)) return std::nullopt;
    if (py::isinstance<c10d::ReduceOp>(object)) return py::cast<c10d::ReduceOp>(object);
    throw py::type_error(std::string(what) + ": op is a ReduceOp or its name, not " + Py_TYPE(object.ptr())->tp_name);
}

// The backend of a group for CPU tensors; null if it is of another class, or if `group` is not a group. Reads the
// object directly: py::cast would look its class up.
c10::intrusive_ptr<PrimsBackend> cpu_backend_of(PyObject* group) {
    static auto* const group_class =
        reinterpret_cast<PyTypeObject*>(py::type::of<c10d::ProcessGroup>().release().ptr());
    if (!PyObject_TypeCheck(group, group_class)) return {};
    auto* const members = static_cast<c10d::ProcessGroup*>(
        reinterpret_cast<py::detail::instance*>(group)->get_value_and_holder().value_ptr());
    if (!members || !members->hasBackends()) return {};
    try {
        const auto backend = members->getBackend(c10::kCPU);
        const c10d::Backend& object = *backend;
        if (typeid(object) != typeid(PrimsBackend)) return {};
        return c10::static_intrusive_pointer_cast<PrimsBackend>(backend);
    } catch (const c10::Error&) {  // no backend for CPU tensors
        return {};
    }
}

// The tensor of a Python object; null unless it is a contiguous CPU tensor that requires no gradient. Also null for an
// object of a subclass, such as a DTensor, because it may have no memory.
const at::Tensor* plain_tensor(PyObject* object) {
    if (!THPVariable_CheckExact(object)) return nullptr;
    const at::Tensor& tensor = THPVariable_Unpack(object);  // of an object that the caller keeps
    const bool is_plain = tensor.is_cpu() && tensor.layout() == at::kStrided && !tensor.requires_grad() &&
                          !tensor.is_conj() && !tensor.is_neg() && tensor.is_contiguous();
    return is_plain ? &tensor : nullptr;
}

// The tensor with the whole data, and the tensor with the block of one rank, of a group of `size` ranks.
struct WholeAndBlock {
    WholeAndBlock(PyObject* whole, PyObject* block) : whole(plain_tensor(whole)), block(plain_tensor(block)) {}

    bool fit(int size) const {
        return whole && block && whole->scalar_type() == block->scalar_type() &&
               whole->numel() == size * block->numel();
    }

    const at::Tensor *whole, *block;
};

template <typename Options>
Options synchronous() {
    Options options;
    options.asyncOp = false;
    return options;
}

// Makes a call in the group that is the last of `kCount` arguments, by `make_call(backend)`. Returns True, or False if
// there is no such backend or make_call() returns false: it has made no call then. make_call() begins with the GIL, and
// releases it for the call.
template <Py_ssize_t kCount, typename MakeCall>
PyObject* call_directly(PyObject* const* arguments, Py_ssize_t count, const MakeCall& make_call) {
    try {
        const auto backend = count == kCount ? cpu_backend_of(arguments[kCount - 1]) : nullptr;
        return PyBool_FromLong(backend && make_call(*backend));
    } catch (py::error_already_set& error) {
        error.restore();
    } catch (const abi::__forced_unwind&) {  // Python ends this thread
        throw;
    } catch (...) {
        py::detail::try_translate_exceptions();
    }
    return nullptr;
}

// all_reduce(tensor, op, group): in place. The tensor may be any CPU tensor.
PyObject* all_reduce_directly(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
    return call_directly<3>(arguments, count, [arguments](PrimsBackend& backend) {
        if (!THPVariable_Check(arguments[0])) return false;
        const at::Tensor& tensor = THPVariable_Unpack(arguments[0]);
        if (!tensor.is_cpu()) return false;
        const auto op = reduction_of("all_reduce", arguments[1]);
        if (!op) return false;
        const py::gil_scoped_release released;
        backend.all_reduce_now(tensor, *op);
        return true;
    });
}

// reduce_scatter(output, input, op, group)
PyObject* reduce_scatter_directly(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
    return call_directly<4>(arguments, count, [arguments](PrimsBackend& backend) {
        const WholeAndBlock tensors(arguments[1], arguments[0]);
        if (!tensors.fit(backend.getSize())) return false;
        const auto op = reduction_of("reduce_scatter", arguments[2]);
        if (!op) return false;
        const py::gil_scoped_release released;
        auto options = synchronous<c10d::ReduceScatterOptions>();
        options.reduceOp = *op;
        at::Tensor input = *tensors.whole, output = *tensors.block;
        backend._reduce_scatter_base(output, input, options)->wait();
        return true;
    });
}

// all_gather(output, input, group)
PyObject* all_gather_directly(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
    return call_directly<3>(arguments, count, [arguments](PrimsBackend& backend) {
        const WholeAndBlock tensors(arguments[0], arguments[1]);
        if (!tensors.fit(backend.getSize())) return false;
        const py::gil_scoped_release released;
        at::Tensor output = *tensors.whole, input = *tensors.block;
        backend._allgather_base(output, input, synchronous<c10d::AllgatherOptions>())->wait();
        return true;
    });
}

// all_to_all(output, input, group): blocks of one length.
PyObject* all_to_all_directly(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
    return call_directly<3>(arguments, count, [arguments](PrimsBackend& backend) {
        const WholeAndBlock tensors(arguments[0], arguments[1]);
        if (!tensors.fit(1) || tensors.whole->numel() % backend.getSize() != 0) return false;
        const py::gil_scoped_release released;
        at::Tensor output = *tensors.whole, input = *tensors.block;
        std::vector<int64_t> even;
        backend.alltoall_base(output, input, even, even, synchronous<c10d::AllToAllOptions>())->wait();
        return true;
    });
}

// broadcast(tensor, root, group): the root as a rank of the group.
PyObject* broadcast_directly(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
    return call_directly<3>(arguments, count, [arguments](PrimsBackend& backend) {
        const at::Tensor* const tensor = plain_tensor(arguments[0]);
        if (!tensor || !PyLong_CheckExact(arguments[1])) return false;
        int overflow = 0;
        const long root = PyLong_AsLongAndOverflow(arguments[1], &overflow);
        if (overflow || root < 0 || root >= backend.getSize()) return false;
        const py::gil_scoped_release released;
        auto options = synchronous<c10d::BroadcastOptions>();
        options.rootRank = root;
        Tensors tensors{*tensor};
        backend.broadcast(tensors, options)->wait();
        return true;
    });
}

// barrier(group)
PyObject* barrier_directly(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
    return call_directly<1>(arguments, count, [](PrimsBackend& backend) {
        const py::gil_scoped_release released;
        backend.barrier(synchronous<c10d::BarrierOptions>())->wait();
        return true;
    });
}

}  // namespace

void bind_direct_calls(py::module_& module) {
    const auto function = [](const char* name, _PyCFunctionFast call) {
        return PyMethodDef{name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL,
                           nullptr};
    };
    static std::array functions{
        function("all_reduce", all_reduce_directly), function("reduce_scatter", reduce_scatter_directly),
        function("all_gather", all_gather_directly), function("all_to_all", all_to_all_directly),
        function("broadcast", broadcast_directly),   function("barrier", barrier_directly)};
    for (PyMethodDef& each : functions)
        module.attr(each.ml_name) = py::reinterpret_steal<py::object>(PyCFunction_New(&each, nullptr));
}

}  // namespace dist_prims
