"""Private and version-dependent API of torch, each behind a documented function.

The rest of the package calls these functions and no private API of torch, so that a new release of torch needs changes
in this module only (``tests/project/test_style.py`` lists the files that are still exempt). The module imports nothing
of dist_prims, and supports torch 2.11 and later.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.modules import batchnorm
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

__all__: list[str] = []

# The new names of all_gather_into_tensor and reduce_scatter_tensor, which torch 2.13 has renamed.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
AllgatherOptions: Any = dist.distributed_c10d.AllgatherOptions
# world["_default_pg"] is the default group or None. The other ways to it cost 5 to 10 % of the shortest all_reduce.
world: dict[str, Any] = vars(dist.distributed_c10d._world)
# default_group() returns the default group, and raises ValueError if there is none.
default_group: Callable[[], dist.ProcessGroup] = dist.distributed_c10d._get_default_group
# graph_task_id() identifies the backward pass that runs in this thread; -1 outside of one.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
BatchNorm: TypeAlias = batchnorm._BatchNorm
Norm: TypeAlias = batchnorm._NormBase  # the base of BatchNorm and of instance norms


def group_named(name: str) -> dist.ProcessGroup:
    """The group with this ``group_name``.

    >>> group_named(default_group().group_name) is default_group()
    True
    """
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]  # torch 2.11 takes a str


def backend_name(group: dist.ProcessGroup) -> str:
    """The backend for which a group was made, also where ``DIST_PRIMS_AS`` lets programs see another name.

    >>> backend_name(default_group())
    'gloo'
    """
    return str(inspect.unwrap(dist.get_backend)(group))


def device_types(group: dist.ProcessGroup) -> list[str]:
    """The device types that a group has a backend for, in torch's order; empty for a group without devices.

    >>> "cpu" in device_types(default_group())
    True
    """
    return [device.type for device in group._device_types]


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend object of a group for a device; RuntimeError if the group has none.

    >>> backend_of(default_group(), torch.device("cpu")).rank()
    0
    """
    return group._get_backend(device)


def message_device(group: dist.ProcessGroup | None) -> torch.device:
    """The device of small messages in a group: the CPU, if the group has a backend for it.

    >>> message_device(None)
    device(type='cpu')
    """
    types = device_types(group or default_group())
    if not types or "cpu" in types:
        return torch.device("cpu")
    return torch.device(types[0], torch.get_device_module(types[0]).current_device())


def exposed_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout of a group's collectives on a device, if the backend exposes it."""
    timeout = getattr(getattr(backend_of(group, device), "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The timeout of a group's collectives on a device; torch's default where the backend does not expose one.

    >>> timeout_of(default_group(), torch.device("cpu")) > timedelta(0)
    True
    """
    return exposed_timeout(group, device) or dist.default_pg_timeout


def group_store(group: dist.ProcessGroup) -> dist.Store | None:
    """The store that the ranks of a group share; None if torch keeps none for it."""
    backend_and_store = dist.distributed_c10d._world.pg_map.get(group)
    return backend_and_store[1] if backend_and_store else None


def nccl_options(timeout: timedelta) -> Any:
    """Options for a ProcessGroupNCCL with this timeout."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that is loaded. ``torch.cuda.nccl`` has the version that torch was compiled with."""
    with contextlib.suppress(OSError, AttributeError):  # no such library if NCCL is linked into torch
        number = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
        return number.value // 10000, number.value // 100 % 100, number.value % 100
    return tuple(torch.cuda.nccl.version())


def premul_factor(op: Any) -> Any:
    """The factor of a PREMUL_SUM: a number or a tensor. Before torch 2.13 only its pickled form contains the factor.

    >>> premul_factor(dist._make_nccl_premul_sum(2.0))
    2.0
    """
    return op.factor if hasattr(dist.ReduceOp, "factor") else op.__getstate__()[1]


def set_default_backend(device: str, name: str) -> None:
    """Set the backend that torch takes for a device if a program names none."""
    dist.Backend.default_device_backend_map[device] = name


def replace_function(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of ``torch.distributed`` by ``wrap`` of it, in all modules of torch that have it."""
    function = getattr(dist, name)
    replacement = wrap(function)
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "torch" and vars(module).get(name) is function:
            setattr(module, name, replacement)


def rendezvous_handlers() -> dict[str, Callable[..., Any]]:
    """The rendezvous handlers of ``init_process_group`` by URL scheme. A change of this dictionary takes effect."""
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Callable[..., Any]] = module._rendezvous_handlers
    return handlers


def knows_group(group: dist.ProcessGroup) -> bool:
    """Whether ``torch.distributed`` has made this group, and has not destroyed it."""
    return group in dist.distributed_c10d._world.pg_map


def new_local_group(
    ranks: list[int], rank: int, backend: str, name: str, options: Any, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a group by a call of its own ranks only, with a given name; ``rank`` is this process within it.

    torch's ``new_group`` must be called by every rank of the world, or names the group by the number of groups of this
    process, which may differ by rank. If the world is bound to a device, torch splits the communicator of NCCL from
    the world's communicator, which every rank of the world must call. So the world is not bound during this call.
    """
    c10d, world = dist.distributed_c10d, default_group()
    device, world.bound_device_id = world.bound_device_id, None
    try:
        made: Any = c10d._new_process_group_helper(
            len(ranks),
            rank,
            ranks,
            c10d.Backend(backend),
            c10d._world.pg_map[world][1],
            name,  # type: ignore[arg-type]  # torch 2.11 takes a str
            backend_options=options,
            timeout=timeout,
            group_desc=name,
        )[0]
    finally:
        world.bound_device_id = device
    c10d._world.pg_group_ranks[made] = {rank: position for position, rank in enumerate(ranks)}
    group: dist.ProcessGroup = made
    return group


def replace_group(
    old: dist.ProcessGroup, backend: Any, store: dist.Store, ranks: Sequence[int], name: str
) -> dist.ProcessGroup:
    """Destroy a group, and register one with this backend object in its place.

    ``ranks`` are the ranks of the new group in the old one. If ``old`` is the default group, all groups are destroyed,
    and the global ranks are the ranks of the new group.
    """
    c10d: Any = dist.distributed_c10d
    world = c10d._world
    kind = backend_name(old)
    if old is default_group():
        dist.destroy_process_group()
        return install_default_group(backend, store, name, kind)
    description = old.group_desc
    old_ranks = {position: rank for rank, position in world.pg_group_ranks[old].items()}
    dist.destroy_process_group(old)
    members = {old_ranks[rank]: position for position, rank in enumerate(ranks)}
    return _install_group(backend, store, name, kind, description, members)


def install_default_group(backend: Any, store: dist.Store, name: str, kind: str) -> dist.ProcessGroup:
    """Register a group with this backend object as the default group; there must be no default group.

    ``kind`` is the backend that a program names for such a group: a name, or names by device. The backend object serves
    all these devices.
    """
    c10d: Any = dist.distributed_c10d
    members = {rank: rank for rank in range(backend.size())}
    group = _install_group(backend, store, name, kind, "default_pg", members)
    c10d._update_default_pg(group)
    count_groups_from(0)  # an init_process_group() that failed has counted
    return group


def _install_group(
    backend: Any, store: dist.Store, name: str, kind: str, description: str, members: dict[int, int]
) -> dist.ProcessGroup:
    c10d: Any = dist.distributed_c10d
    world = c10d._world
    prefixed = dist.PrefixStore(f"{name}/", store)
    config = str(c10d.BackendConfig(c10d.Backend(kind)))
    group: Any = unlisted_group(backend, prefixed, [part.partition(":")[0] for part in config.split(",")])
    group._set_group_name(name)
    group._set_group_desc(description)
    world.pg_map[group] = (kind, prefixed)
    world.pg_names[group] = name
    world.pg_backend_config[group] = config
    world.pg_group_ranks[group] = members
    tag = f"ptd:{name}"
    for group_tag in ("", tag):
        world.tags_to_pg.setdefault(group_tag, []).append(group)
    world.pg_to_tag[group] = tag
    c10d._register_process_group(name, group)
    installed: dist.ProcessGroup = group
    return installed


def unlisted_group(backend: Any, store: dist.Store, devices: Sequence[str] = ("cpu",)) -> dist.ProcessGroup:
    """A group with this backend object, which ``torch.distributed`` does not list: the caller calls its methods."""
    group: Any = dist.ProcessGroup(store, backend.rank(), backend.size())
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(kind)
    for device in devices:
        group._register_backend(torch.device(device), kind, backend)
    unlisted: dist.ProcessGroup = group
    return unlisted


def known_groups() -> list[dist.ProcessGroup]:
    """The groups of this process that torch lists."""
    return list(dist.distributed_c10d._world.pg_map)


def replace_members(group: dist.ProcessGroup, store: dist.Store, ranks: dict[int, int]) -> None:
    """Tell torch that a group has other members: the store that they share, and their ranks in it by global rank.

    torch 2.15 asks the backend for the rank and the size of a group, but keeps the store and the global ranks of the
    members before.
    """
    world: Any = dist.distributed_c10d._world
    world.pg_map[group] = world.pg_map[group][0], dist.PrefixStore(f"{group.group_name}/", store)
    world.pg_group_ranks[group] = ranks


def group_count() -> int:
    """The number of groups that ``new_group`` has made in this process, by which it names the next one."""
    return int(dist.distributed_c10d._world.group_count)


def count_groups_from(number: int) -> None:
    """Let ``new_group`` count from this number: all members of the default group must have the same count."""
    dist.distributed_c10d._world.group_count = number


def register_fake_backend() -> None:
    """Make torch's backend "fake" known, which sends nothing."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")


def queue_backward_callback(call: Callable[[], None]) -> None:
    """Have autograd call ``call`` at the end of the backward pass that runs in this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def saved_tensor_hooks(*, while_tracing: bool = False) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The innermost hooks for saved tensors (pack, unpack) of this thread, if there are any."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(while_tracing)
    return hooks  # type: ignore[no-any-return]


def is_in_function_transform() -> bool:
    """Whether a transform of torch.func, such as vmap, runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def without_torch_function() -> Any:
    """A context in which subclasses of Tensor are treated as plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()


def version_of(tensor: torch.Tensor) -> int:
    """The number of changes in place that autograd has counted.

    >>> version_of(torch.ones(1).add_(1))
    1
    """
    return tensor._version


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd regards a tensor as a view of another one."""
    return tensor._is_view()


def storage_id(tensor: torch.Tensor) -> int:
    """A number that tensors have in common exactly if they use the same storage.

    >>> x = torch.ones(4)
    >>> storage_id(x) == storage_id(x[2:])
    True
    """
    number: int = tensor.untyped_storage()._cdata
    return number


def storage_users(storage: Any) -> int:
    """The number of references to a storage: tensors, and this Python object."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def not_a_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same memory, with a gradient, that can be changed in place: neither a leaf nor a view.

    >>> x = torch.tensor([-1.0, 1.0], requires_grad=True)
    >>> not_a_leaf(x).relu_().sum().backward()
    >>> x.grad
    tensor([0., 1.])
    """
    same: torch.Tensor = torch.ops.aten._unsafe_view.default(tensor, tensor.shape)
    return same


def has_call_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks are called with a module, forward or backward.

    >>> has_call_hooks(torch.nn.ReLU())
    False
    """
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The registered children of a module: a change of this dictionary changes the module."""
    return module._modules


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether hooks are called with the gradient of a parameter."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def chosen_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> Any:
    """The kernel that ``scaled_dot_product_attention`` would take, as a member of ``SDPBackend``."""
    from torch.nn.attention import SDPBackend

    return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=causal))


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Any:
    """The flash kernel on the CPU: the output, and the logarithms of its softmax's denominators."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def flash_attention_backward(*tensors: torch.Tensor, causal: bool, scale: float) -> Any:
    """The gradients of q, k and v; ``tensors``: the gradient, q, k, v, the output and the logarithms."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, causal, scale=scale)


def found_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:
    """What ``unscale_`` has found, by device: a tensor that is 1 if a gradient is not finite."""
    return scaler._found_inf_per_device(optimizer)
