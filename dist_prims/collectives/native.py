"""Calls that name no algorithm: the group's own backend makes them where it gives the result that a schedule would.

The backend dist_prims serves every type, operation and list of lengths, and compares the calls of all ranks. Gloo
serves what is listed here, and does not compare the calls. All other calls, those over NCCL included, run a schedule
from Python. The choice depends only on what all ranks have in common, so all ranks make the same choice.
"""

from __future__ import annotations

import functools
import os
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from ..schedules import Schedule
from ..schedules.native import to_native
from ..torch_compat import (
    all_gather_single,
    backend_of,
    default_group,
    device_types,
    premul_sum,
    reduce_scatter_single,
)
from .flat import cut

if TYPE_CHECKING:
    from .call import Call

__all__ = [
    "NativeWork",
    "all_gather_",
    "all_reduce_",
    "compiled",
    "direct",
    "is_of_dist_prims",
    "reduce_scatter_",
    "run_in_backend",
    "run_natively",
    "serves",
]

_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})
_FLOATS = frozenset({torch.float32, torch.float64})
_HALVES = frozenset({torch.float16, torch.bfloat16})
_MOVABLE = _FLOATS | _HALVES | _INTEGERS
_EVEN_ONLY = ("all_gather", "reduce_scatter", "all_to_all")
_Op = dist.ReduceOp
# AVG is a sum that is divided afterwards, which overflows in half types. MIN and MAX may lose a NaN.
_REDUCIBLE = {
    _Op.SUM: _MOVABLE,
    _Op.PREMUL_SUM: _MOVABLE,
    _Op.PRODUCT: _MOVABLE,
    _Op.AVG: _FLOATS,
    _Op.MIN: _INTEGERS,
    _Op.MAX: _INTEGERS,
}
_VARIABLES = {
    name: f"DIST_PRIMS_{name.upper()}" for name in ("all_reduce", "all_gather", "broadcast", "reduce_scatter")
}
_NAP = 0.0002  # seconds
_LONGEST_NAME = 47  # of an algorithm, in the agreement of the backend


_all_reduces: dict[int, Callable[..., None]] = {}  # by the id of a group that lives
_backends: dict[int, dict[str, Any]] = {}  # by the id of a group that lives, and the type of a device


def _backend_for(group: dist.ProcessGroup, device: torch.device) -> Any:
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
    op: dist.ReduceOp.RedOpType | dist.ReduceOp = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Reduce ``tensor`` in place over the ranks of a group and return it: ``torch.distributed.all_reduce`` without what
    that adds to each call. For a group whose backend is another one it is the same as that.

    >>> all_reduce_(torch.ones(2))
    tensor([1., 1.])
    """
    of = group or default_group()
    call = _all_reduces.get(id(of)) or _direct_call(of)
    call(tensor, op)
    return tensor


def _direct_call(group: dist.ProcessGroup) -> Callable[..., None]:
    """The backend's own call, looked up once for a group."""
    backend = _backend_for(group, torch.device("cpu"))
    call = getattr(backend, "all_reduce_", None) or functools.partial(_through_torch, weakref.ref(group))
    _all_reduces[id(group)] = call
    weakref.finalize(group, _all_reduces.pop, id(group), None)
    return call


def _through_torch(group: weakref.ref[dist.ProcessGroup], tensor: torch.Tensor, op: Any) -> None:
    dist.all_reduce(tensor, op, group())


def _is_ours(backend: Any) -> bool:
    return hasattr(backend, "run_schedule")


def is_of_dist_prims(call: Call) -> bool:
    return call.like.device.type == "cpu" and _is_ours(_backend_for(call.group, call.like.device))


def serves(call: Call) -> bool:
    """Whether the group's backend makes this call as a schedule of ours would; the same on all ranks."""
    if call.collective in ("scan", "exclusive_scan"):
        return False
    if call.collective in _EVEN_ONLY and not (call.even and len(set(call.blocks)) == 1):
        return is_of_dist_prims(call)
    op = None if call.collective == "barrier" else call.op
    return _takes(_backend_for(call.group, call.like.device), call.like, op)


def _takes(backend: Any, tensor: torch.Tensor, op: Any) -> bool:
    """Whether a backend reduces tensors of this type so, or, without an operation, moves them."""
    if tensor.device.type != "cpu":
        return False
    if _is_ours(backend):
        return True
    return type(backend).__name__ == "ProcessGroupGloo" and tensor.dtype in (
        _MOVABLE if op is None else _REDUCIBLE.get(op, ())
    )


def direct(collective: str, tensors: Sequence[Any], op: Any, group: dist.ProcessGroup | None) -> Any:
    """The group of a call, if that can go to torch.distributed as it is; else None.

    A rank may take this shortcut where another rank does not: run_natively() makes the same calls.
    """
    of = dist.group.WORLD if group is None else group
    first = tensors[0]
    if not isinstance(of, dist.ProcessGroup) or _VARIABLES[collective] in os.environ:
        return None
    for tensor in tensors:
        is_plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.dtype == first.dtype
        if not is_plain or tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
            return None
    backend = _backend_for(of, first.device)
    if not _takes(backend, first, op) or (op == _Op.AVG and not _is_ours(backend)):
        return None
    is_plain = op is None or (isinstance(op, _Op.RedOpType) and op != _Op.PREMUL_SUM)
    return of if is_plain else None


def all_gather_(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    """A plain all_gather of contiguous tensors. Flat ones: gloo takes others by some shapes only."""
    all_gather_single(output.view(-1), input.view(-1), group=group)


def reduce_scatter_(output: torch.Tensor, input: torch.Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """A plain reduce_scatter of contiguous tensors. Gloo has none but an all_reduce."""
    if _is_ours(_backend_for(group, input.device)):
        reduce_scatter_single(output.view(-1), input.view(-1), op=op, group=group)
        return
    whole = input.clone()
    dist.all_reduce(whole, op, group)
    output.view(-1).copy_(whole.view(group.size(), output.numel())[group.rank()])


class NativeWork:
    """A call of the group's own backend that was started with ``async_op=True``."""

    def __init__(self, work: dist.Work, after: Sequence[Callable[[], object]], what: str) -> None:
        self._work = work
        self._future = work.get_future().then(lambda done: _finish(done, after))
        self._what = what

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the result is there; raise what went wrong, or TimeoutError: then the call goes on."""
        if timeout is not None:  # the backend's own wait would end the group
            deadline = time.monotonic() + timeout.total_seconds()
            while not self._future.done():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self._what} was not done within {timeout}")
                time.sleep(_NAP)
        self._work.wait()
        self._future.wait()
        return True


def _finish(done: Any, after: Sequence[Callable[[], object]]) -> None:
    done.wait()  # raises what the call has raised
    with torch.no_grad():
        for each in after:
            each()


@dataclass
class _Native:
    """The tensors of a call as torch.distributed takes them, and what is left to do when it has ended."""

    call: Call
    after: list[Callable[[], object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rank, self.size = self.call.group.rank(), self.call.group.size()
        self.is_root = self.rank == self.call.root
        self.is_ours = is_of_dist_prims(self.call)
        self.divides = self.call.op == _Op.AVG and not self.is_ours
        self.op: Any = _Op.SUM if self.divides else self.call.op
        if self.call.op == _Op.PREMUL_SUM:  # the source is multiplied already
            self.op = premul_sum(1.0) if self.is_ours else _Op.SUM
        self.common: dict[str, Any] = {"group": self.call.group}

    def reduced(self, target: torch.Tensor) -> torch.Tensor:
        """The tensor, to be divided after the call if it is a mean that the backend does not know."""
        if self.divides:
            self.after.append(lambda: target.div_(self.size))
        return target

    def in_place(self) -> torch.Tensor:
        """The data where it may be overwritten. The target is not touched before all ranks have agreed."""
        source, target = self.call.source[0], self.call.target[0]
        assert source is not None
        if target is None:
            return source if self.is_ours else source.clone()  # gloo uses it for partial sums
        if source.data_ptr() == target.data_ptr():
            return self.reduced(target)
        copy = self.reduced(source.clone())
        self.after.append(lambda: target.copy_(copy))
        return copy

    def whole(self, blocks: Sequence[torch.Tensor], is_output: bool) -> torch.Tensor:
        """The blocks in one tensor. Gloo may not pair a call that has a list of tensors with one that has a tensor."""
        found = _joined(blocks)
        if found is None:
            found = torch.cat([*blocks])
            if is_output:
                parts = cut(found, [block.numel() for block in blocks])
                self.after.extend(functools.partial(b.copy_, part) for b, part in zip(blocks, parts, strict=True))
        return found

    def all_reduce(self, is_async: bool) -> Any:
        tensor = self.in_place()
        if not self.is_ours:
            return dist.all_reduce(tensor, self.op, async_op=is_async, **self.common)
        if is_async:  # not by torch.distributed: it views complex numbers as pairs, which all_reduce_() does not
            options = dist.AllreduceOptions()
            options.reduceOp, options.asyncOp = self.op, True
            return self.call.group.allreduce([tensor], options)
        all_reduce_(tensor, self.op, self.call.group)
        return None

    def reduce(self, is_async: bool) -> Any:
        return dist.reduce(self.in_place(), op=self.op, group_dst=self.call.root, async_op=is_async, **self.common)

    def broadcast(self, is_async: bool) -> Any:
        return dist.broadcast(
            cast(torch.Tensor, self.call.target[0]), group_src=self.call.root, async_op=is_async, **self.common
        )

    def all_gather(self, is_async: bool) -> Any:
        source, blocks = self.call.source[self.rank], _all(self.call.target)
        if self.is_ours:
            return dist.all_gather(blocks, cast(torch.Tensor, source), async_op=is_async, **self.common)
        return all_gather_single(self.whole(blocks, True), source, async_op=is_async, **self.common)

    def reduce_scatter(self, is_async: bool) -> Any:
        target, blocks = self.call.target[self.rank], _all(self.call.source)
        assert target is not None
        if self.is_ours:
            return dist.reduce_scatter(target, blocks, self.op, async_op=is_async, **self.common)
        whole = torch.cat([*blocks])
        self.after.append(lambda: target.copy_(whole.view(self.size, target.numel())[self.rank]))
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
        if self.is_ours:
            return dist.all_to_all(received, sent, async_op=is_async, **self.common)
        target, source = self.whole(received, True), self.whole(sent, False)
        return dist.all_to_all_single(target, source, async_op=is_async, **self.common)

    def barrier(self, is_async: bool) -> Any:
        return dist.barrier(async_op=is_async, **self.common)


def run_natively(call: Call, is_async: bool) -> NativeWork | None:
    """Make a call that serves() says yes to."""
    native = _Native(call)
    with torch.no_grad():
        work: dist.Work | None = getattr(native, call.collective)(is_async)
        return _ended(call, work, [*native.after, *call.after])


def _ended(call: Call, work: dist.Work | None, after: Sequence[Callable[[], object]]) -> NativeWork | None:
    """What to wait for, if anything; what is left to do is done then, or now."""
    if work is not None:
        return NativeWork(work, after, f"{call.collective} on rank {call.group.rank()}")
    for each in after:
        each()
    return None


def compiled(schedule: Schedule, rank: int) -> Any:
    """A schedule as the backend executes it on one of its ranks."""
    parameters = ",".join(f"{key}={value}" for key, value in schedule.parameters if key != "root")
    name = f"{schedule.algorithm}({parameters})" if parameters else schedule.algorithm
    if len(name) > _LONGEST_NAME:  # by name ranks see that they follow one schedule
        name = f"{name[: _LONGEST_NAME - 9]}~{zlib.crc32(name.encode()):08x}"
    return import_module("dist_prims._backend").NativeSchedule(to_native(schedule, rank, 0, 0, name))


def run_in_backend(call: Call, schedule: Any, check: Callable[[], None] | None, is_async: bool) -> NativeWork | None:
    """Make a call by a compiled schedule, in the backend dist_prims, once the ranks have agreed on it and ``check``
    has raised nothing."""
    is_source = call.collective != "broadcast" or call.group.rank() == call.root
    work: dist.Work = _backend_for(call.group, call.like.device).run_schedule(
        collective=call.collective,
        schedule=schedule,
        inputs=call.source if is_source else [None],
        outputs=call.target,
        counts=call.blocks,
        op=call.op,
        root=-1 if call.root is None else call.root,
        check=check,
        async_op=is_async,
    )
    return _ended(call, work if is_async else None, call.after)


def _all(blocks: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [block for block in blocks if block is not None]


def _joined(blocks: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One tensor of blocks that follow each other in memory; None if they do not."""
    first, at = blocks[0], blocks[0].data_ptr()
    for block in blocks:
        if block.data_ptr() != at or block.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        at += block.numel() * block.element_size()
    return first.as_strided((sum(block.numel() for block in blocks),), (1,))
