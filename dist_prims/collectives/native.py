"""Collectives of the group's own backend, for calls without an algorithm and for schedules compiled to C++.

The backend must give the result that a schedule would give. The backend dist_prims supports every type, operation and
list of lengths, and compares the calls of all ranks. Gloo supports the calls in the tables below, and does not compare
calls. All other calls, including those over NCCL, run a schedule in Python. The choice depends only on properties that
are equal on all ranks, so that all ranks make the same choice.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from ..schedules import Schedule
from ..schedules.program import Program, RankSchedule
from ..schedules.trust import name_to_compare
from ..torch_compat import (
    all_gather_single,
    backend_of,
    default_group,
    device_types,
    reduce_scatter_single,
)
from .algorithm_choice import variable_of
from .flat import cut
from .queue import Work
from .reduction import op_named

if TYPE_CHECKING:
    from .call import Call

__all__: list[str] = []

_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})
_FLOATS = frozenset({torch.float32, torch.float64})
_HALVES = frozenset({torch.float16, torch.bfloat16})
_MOVABLE = _FLOATS | _HALVES | _INTEGERS
_EVEN_ONLY = ("all_gather", "reduce_scatter", "all_to_all")
_Op = dist.ReduceOp
# Gloo's reductions. AVG is computed as a sum that is divided afterwards, and half types would overflow. Gloo's MIN and
# MAX of floats may lose a NaN.
_REDUCIBLE = {
    _Op.SUM: _MOVABLE,
    _Op.PREMUL_SUM: _MOVABLE,
    _Op.PRODUCT: _MOVABLE,
    _Op.AVG: _FLOATS,
    _Op.MIN: _INTEGERS,
    _Op.MAX: _INTEGERS,
}
_VARIABLES = {name: variable_of(name) for name in ("all_reduce", "all_gather", "broadcast", "reduce_scatter")}


_all_reduces: dict[int, Callable[..., None]] = {}  # by the id of a live group
_backends: dict[int, dict[str, Any]] = {}  # by the id of a live group and the device type


def _backend_for(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend of a group for a device, from a cache; None if the group has none."""
    known = _backends.get(id(group))
    if known is None:
        known = _backends[id(group)] = {}
        weakref.finalize(group, _backends.pop, id(group), None)
    found = known.get(device.type)
    if found is None and device.type in device_types(group):
        found = known[device.type] = backend_of(group, device)
    return found


def all_reduce_(
    tensor: torch.Tensor,
    op: dist.ReduceOp.RedOpType | dist.ReduceOp | str = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Reduce ``tensor`` in place over the ranks of a group, and return it.

    The function is ``torch.distributed.all_reduce`` without the latency of torch's dispatch. In a group with another
    backend than dist_prims it calls ``torch.distributed.all_reduce``.

    >>> all_reduce_(torch.ones(2))
    tensor([1., 1.])
    """
    target = group or default_group()
    call = _all_reduces.get(id(target)) or _find_all_reduce(target)
    try:
        call(tensor, op)
    except TypeError:  # a name is looked up here, so that the usual call has no check
        if not isinstance(op, str):
            raise
        call(tensor, op_named(op, "all_reduce_"))
    return tensor


def _find_all_reduce(group: dist.ProcessGroup) -> Callable[..., None]:
    """Look up the all_reduce of a group's backend, once for a group."""
    backend = _backend_for(group, torch.device("cpu"))
    call = getattr(backend, "all_reduce_", None) or functools.partial(_through_torch, weakref.ref(group))
    _all_reduces[id(group)] = call
    weakref.finalize(group, _all_reduces.pop, id(group), None)
    return call


def _through_torch(group: weakref.ref[dist.ProcessGroup], tensor: torch.Tensor, op: Any) -> None:
    dist.all_reduce(tensor, op, group())


def _is_dist_prims(backend: Any) -> bool:
    return hasattr(backend, "run_call")


def is_on_dist_prims(call: Call) -> bool:
    return call.like.device.type == "cpu" and _is_dist_prims(_backend_for(call.group, call.like.device))


def backend_supports(call: Call) -> bool:
    """Whether the group's backend gives the result of a schedule for this call; the same on all ranks."""
    if call.collective in ("scan", "exclusive_scan"):
        return False
    if call.collective in _EVEN_ONLY and not (call.even and len(set(call.blocks)) == 1):
        return is_on_dist_prims(call)
    op = None if call.collective == "barrier" else call.op
    return _supports(_backend_for(call.group, call.like.device), call.like, op)


def _supports(backend: Any, tensor: torch.Tensor, op: Any) -> bool:
    """Whether a backend supports a reduction of this type or, if ``op`` is None, a transfer."""
    if tensor.device.type != "cpu":
        return False
    if _is_dist_prims(backend):
        return True
    return type(backend).__name__ == "ProcessGroupGloo" and tensor.dtype in (
        _MOVABLE if op is None else _REDUCIBLE.get(op, ())
    )


def direct_group(collective: str, tensors: Sequence[Any], op: Any, group: dist.ProcessGroup | None) -> Any:
    """Return the group of a call that can be passed to torch.distributed unchanged, else None.

    A rank may use this shortcut where another rank does not: run_in_backend() and run_over_gloo() make the same calls.
    """
    target = dist.group.WORLD if group is None else group
    first = tensors[0]
    if not isinstance(target, dist.ProcessGroup):
        return None
    for tensor in tensors:
        is_plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.dtype == first.dtype
        if not is_plain or tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
            return None
    backend = _backend_for(target, first.device)
    is_other = not _is_dist_prims(backend)  # a group of dist_prims has pinned what the environment names
    if not _supports(backend, first, op) or (is_other and (op == _Op.AVG or _VARIABLES[collective] in os.environ)):
        return None
    is_plain = op is None or (isinstance(op, _Op.RedOpType) and op != _Op.PREMUL_SUM)
    return target if is_plain else None


def all_gather_(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-gather contiguous tensors.

    They are passed as flat tensors, because gloo accepts others of some shapes only.
    """
    all_gather_single(output.view(-1), input.view(-1), group=group)


def reduce_scatter_(output: torch.Tensor, input: torch.Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """Reduce-scatter contiguous tensors; on gloo, which has no such collective, by an all_reduce."""
    if _is_dist_prims(_backend_for(group, input.device)):
        reduce_scatter_single(output.view(-1), input.view(-1), op=op, group=group)
        return
    whole = input.clone()
    dist.all_reduce(whole, op, group)
    output.view(-1).copy_(whole.view(group.size(), output.numel())[group.rank()])


def _settle(future: Future[None], after: Sequence[Callable[[], object]], done: Any) -> None:
    try:
        done.wait()  # raises the exception of the call
        _run_all(after)
    except BaseException as error:  # every exception is for the caller of wait()
        future.set_exception(error)
    else:
        future.set_result(None)


def _run_all(after: Sequence[Callable[[], object]]) -> None:
    with torch.no_grad():
        for each in after:
            each()


@dataclass
class _OverGloo:
    """Converter of a Call to a call of torch.distributed over gloo; ``after``: functions to call when it has completed.

    These functions must not refer to this object: the cycle of references would keep the group and the tensors.
    """

    call: Call
    after: list[Callable[[], object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rank, self.size = self.call.group.rank(), self.call.group.size()
        self.is_root = self.rank == self.call.root
        self.divides = self.call.op == _Op.AVG
        # The source of a PREMUL_SUM has been multiplied already.
        self.op: Any = _Op.SUM if self.call.op in (_Op.AVG, _Op.PREMUL_SUM) else self.call.op
        self.common: dict[str, Any] = {"group": self.call.group}

    def reduced(self, target: torch.Tensor) -> torch.Tensor:
        """Return the tensor; for a mean, which gloo does not support, divide it after the call."""
        if self.divides:
            self.after.append(functools.partial(target.div_, self.size))
        return target

    def in_place(self) -> torch.Tensor:
        """Return the data in memory that may be written. The target does not change before the ranks have agreed."""
        source, target = self.call.source[0], self.call.target[0]
        assert source is not None
        if target is None:
            return source.clone()  # gloo writes partial sums to it
        if source.data_ptr() == target.data_ptr():
            return self.reduced(target)
        copy = self.reduced(source.clone())
        self.after.append(lambda: target.copy_(copy))
        return copy

    def whole(self, blocks: Sequence[torch.Tensor], is_output: bool) -> torch.Tensor:
        """Return the blocks as one tensor: gloo may not match a call with a list to a call with one tensor."""
        found = _joined(blocks)
        if found is None:
            found = torch.cat([*blocks])
            if is_output:
                parts = cut(found, [block.numel() for block in blocks])
                self.after.extend(functools.partial(b.copy_, part) for b, part in zip(blocks, parts, strict=True))
        return found

    def all_reduce(self, is_async: bool) -> Any:
        return dist.all_reduce(self.in_place(), self.op, async_op=is_async, **self.common)

    def reduce(self, is_async: bool) -> Any:
        return dist.reduce(self.in_place(), op=self.op, group_dst=self.call.root, async_op=is_async, **self.common)

    def broadcast(self, is_async: bool) -> Any:
        return dist.broadcast(
            cast(torch.Tensor, self.call.target[0]), group_src=self.call.root, async_op=is_async, **self.common
        )

    def all_gather(self, is_async: bool) -> Any:
        source, blocks = self.call.source[self.rank], _all(self.call.target)
        return all_gather_single(self.whole(blocks, True), source, async_op=is_async, **self.common)

    def reduce_scatter(self, is_async: bool) -> Any:
        target, blocks = self.call.target[self.rank], _all(self.call.source)
        assert target is not None
        whole = torch.cat([*blocks])
        own = whole.view(self.size, target.numel())[self.rank]
        self.after.append(lambda: target.copy_(own))
        self.reduced(target)
        return dist.all_reduce(whole, self.op, async_op=is_async, **self.common)

    def gather(self, is_async: bool) -> Any:
        blocks = _all(self.call.target) if self.is_root else None
        root = self.call.root
        source = cast(torch.Tensor, self.call.source[self.rank])
        return dist.gather(source, blocks, group_dst=root, async_op=is_async, **self.common)

    def scatter(self, is_async: bool) -> Any:
        blocks = _all(self.call.source) if self.is_root else None
        root = self.call.root
        target = cast(torch.Tensor, self.call.target[self.rank])
        return dist.scatter(target, blocks, group_src=root, async_op=is_async, **self.common)

    def all_to_all(self, is_async: bool) -> Any:
        sent, received = _all(self.call.source[: self.size]), _all(self.call.target[self.size :])
        target, source = self.whole(received, True), self.whole(sent, False)
        return dist.all_to_all_single(target, source, async_op=is_async, **self.common)

    def barrier(self, is_async: bool) -> Any:
        return dist.barrier(async_op=is_async, **self.common)


def run_over_gloo(call: Call, is_async: bool) -> Work | None:
    """Make a call that backend_supports() accepts, through torch.distributed over gloo."""
    native = _OverGloo(call)
    with torch.no_grad():
        work: dist.Work | None = getattr(native, call.collective)(is_async)
    return _work_or_finish(call, work, [*native.after, *call.after])


def _work_or_finish(call: Call, work: dist.Work | None, after: Sequence[Callable[[], object]]) -> Work | None:
    """Return the work of an asynchronous call, which calls ``after`` at its end. Else call ``after`` now."""
    if work is None:
        _run_all(after)
        return None
    future: Future[None] = Future()
    work.get_future().then(functools.partial(_settle, future, after))
    return Work(future, f"{call.collective} on rank {call.group.rank()}")


def schedule_name(schedule: Schedule) -> str:
    """Return the algorithm with its parameters, such as ``tree(degree=2)``."""
    parameters = ",".join(f"{key}={value}" for key, value in schedule.parameters if key != "root")
    return f"{schedule.algorithm}({parameters})" if parameters else schedule.algorithm


def compiled(schedule: Schedule, rank: int, segments: int) -> Any:
    """Compile a schedule for execution by the backend on one rank."""
    own = RankSchedule.of(schedule, rank, schedule_name(schedule), segments)
    return import_module("dist_prims._backend").NativeSchedule(own)


def compiled_without_steps(schedule: Schedule, rank: int) -> Any:
    """Return what the ranks compare of a schedule that cannot be compiled; the check of the call must refuse it."""
    name = name_to_compare(schedule, schedule_name(schedule))
    program = Program(rank, schedule.size, schedule.chunks, 0, steps=())
    return import_module("dist_prims._backend").NativeSchedule(RankSchedule(program, name))


def run_in_backend(
    call: Call, is_async: bool, schedule: Any = None, check: Callable[[], None] | None = None
) -> Work | None:
    """Make a call in the backend dist_prims, by a compiled schedule or, without one, as its group makes it.

    The backend first compares the calls of all ranks and calls ``check``, which raises for a schedule that must not
    run.
    """
    is_source = call.collective != "broadcast" or call.group.rank() == call.root
    work: dist.Work = _backend_for(call.group, call.like.device).run_call(
        collective=call.collective,
        schedule=schedule,
        inputs=call.source if is_source else [None],
        outputs=call.target,
        counts=call.blocks,
        op=call.op,
        root=-1 if call.root is None else call.root,
        is_even=call.even,
        check=check,
        async_op=is_async,
    )
    return _work_or_finish(call, work if is_async else None, call.after)


def _all(blocks: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [block for block in blocks if block is not None]


def _joined(blocks: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one tensor of blocks that are consecutive in memory; None if they are not."""
    first, address = blocks[0], blocks[0].data_ptr()
    for block in blocks:
        if block.data_ptr() != address or block.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        address += block.numel() * block.element_size()
    return first.as_strided((sum(block.numel() for block in blocks),), (1,))
