"""Collectives of the group's own backend, for calls without an algorithm and for schedules compiled to C++.

The backend dist_prims supports every type, operation and list of lengths, and compares the calls of all ranks. Gloo
does not compare calls, so only calls whose schedules would take several times as long are gloo's: a sum or a mean of
all_reduce, a broadcast and a barrier. All other calls, including those over NCCL, run a schedule in Python. The choice
depends only on properties that are equal on all ranks, so that all ranks make the same choice.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from ..schedules import Schedule
from ..schedules.program import Program, RankSchedule
from ..schedules.trust import name_to_compare
from ..torch_compat import backend_of, device_types
from .call import Call
from .queue import Work

__all__: list[str] = []

_Op = dist.ReduceOp
_FLOATS = frozenset({torch.float32, torch.float64})
_MOVABLE = _FLOATS | {torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64}
# The types of gloo's calls. AVG is computed as a sum that is divided afterwards, and half types would overflow.
_GLOO_SUMS = {_Op.SUM: _MOVABLE, _Op.PREMUL_SUM: _MOVABLE, _Op.AVG: _FLOATS}
_CPU = torch.device("cpu")

_backends: dict[int, dict[str, Any]] = {}  # by the id of a live group and the device type


def _backend_for(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend of a group for a device, from a cache; None if the group has none."""
    by_type = _backends.get(id(group))
    if by_type is None:
        by_type = _backends[id(group)] = {}
        weakref.finalize(group, _backends.pop, id(group), None)
    backend = by_type.get(device.type)
    if backend is None and device.type in device_types(group):
        backend = by_type[device.type] = backend_of(group, device)
    return backend


def _is_dist_prims(backend: Any) -> bool:
    return hasattr(backend, "run_call")


def is_on_dist_prims(call: Call) -> bool:
    """Whether the group's backend for the tensors of the call is dist_prims, which leaves CUDA tensors to NCCL."""
    return call.like.device.type != "cuda" and _is_dist_prims(_backend_for(call.group, call.like.device))


def has_dist_prims_for_cpu(group: dist.ProcessGroup) -> bool:
    return _is_dist_prims(_backend_for(group, _CPU))


def is_for_gloo(call: Call) -> bool:
    """Whether gloo itself makes a call that names no algorithm; the same on all ranks."""
    is_gloo = type(_backend_for(call.group, call.like.device)).__name__ == "ProcessGroupGloo"
    if not is_gloo or call.like.device.type != "cpu":
        return False
    if call.collective == "broadcast":
        return call.like.dtype in _MOVABLE
    is_sum = call.op is not None and call.like.dtype in _GLOO_SUMS.get(call.op, ())
    return call.collective == "barrier" or (call.collective == "all_reduce" and is_sum)


@torch.no_grad()
def run_over_gloo(call: Call) -> Work | None:
    """Make a call that is_for_gloo() accepts."""
    is_async = call.options.async_op
    group, source, target, after = call.group, call.source[0], call.target[0], [*call.after]
    assert target is not None
    if call.collective == "barrier":
        work = dist.barrier(group, async_op=is_async)
    elif call.collective == "broadcast":
        work = dist.broadcast(target, group=group, async_op=is_async, group_src=call.root)
    else:
        assert source is not None
        total = source if source.data_ptr() == target.data_ptr() else source.clone()
        if total is not source:
            after.insert(0, functools.partial(target.copy_, total))
        if call.op == _Op.AVG:
            after.insert(0, functools.partial(total.div_, group.size()))
        work = dist.all_reduce(total, _Op.SUM, group, async_op=is_async)  # a PREMUL_SUM has been multiplied
    return _work_or_finish(call, work, after)


def _settle(future: Future[None], after: Sequence[Callable[[], object]], done: Any) -> None:
    """Complete ``future`` when the backend has made the call. ``done``: torch's future of it, which has completed."""
    try:
        done.wait()  # raises the exception of the call
        _run_all(after)
    except BaseException as error:  # every exception is for the caller of wait()
        future.set_exception(error)
    else:
        future.set_result(None)


def _run_all(after: Sequence[Callable[[], object]]) -> None:
    with torch.no_grad():
        for finish in after:
            finish()


def _work_or_finish(call: Call, work: dist.Work | None, after: Sequence[Callable[[], object]]) -> Work | None:
    """Return the work of an asynchronous call, which calls ``after`` at its end. Else call ``after`` now."""
    if work is None:
        _run_all(after)
        return None
    future: Future[None] = Future()
    work.get_future().then(functools.partial(_settle, future, after))
    return Work(future, call.title, work)


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


def run_in_backend(call: Call, schedule: Any = None, check: Callable[[], None] | None = None) -> Work | None:
    """Make a call in the backend dist_prims, by a compiled ``schedule`` or, without one, by the backend's own choice.

    The backend first compares the calls of all ranks. Then it calls ``check``, which raises for a schedule that must
    not run.
    """
    is_source = call.collective != "broadcast" or call.is_root
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
        async_op=call.options.async_op,
    )
    return _work_or_finish(call, work if call.options.async_op else None, call.after)
