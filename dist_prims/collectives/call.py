"""Execution of one call of any collective: choose an algorithm, compare the calls of all ranks, execute.

The collectives differ only in where the data of a rank is and how it is split. Each collective therefore describes
itself as a Call, and this module contains the common part.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from ..schedules import Schedule, lookup
from ..schedules.program import FOLLOWED, Program, compile_program
from ..schedules.schedule_builder import build_shared
from ..schedules.trust import is_trusted, name_to_compare
from ..torch_compat import timeout_of
from ..tracing import format as fmt
from ..tracing import recorder
from .algorithm_choice import CHEAPEST, UNFORWARDED, AlgorithmRange, cheapest, configured_algorithm, named_algorithm
from .backend_calls import (
    compiled,
    compiled_without_steps,
    is_for_gloo,
    is_on_dist_prims,
    run_in_backend,
    run_over_gloo,
    schedule_name,
)
from .call_agreement import Header, agree
from .channel import Channel
from .flat import split_evenly
from .group_hosts import exchange_hosts, known_hosts
from .program_executor import ChunkSlice, Executor
from .proof_before_use import require_proof
from .queue import Work, queue_of
from .reduction import OP_NAMES
from .traced_call import traced

__all__: list[str] = []

# Calls use the data tags in turn. One data tag would be sufficient, because no rank completes the agreement on a call
# before all ranks have ended the previous call; several tags separate the messages of a call that failed. All tags are
# below 32,767, which every MPI supports as a tag, and below the tags that a multi-host group reserves.
_AGREEMENT_TAG, _DATA_TAG, _TAGS = 0x5D00, 0x5D01, 1 << 12


@dataclass(frozen=True)
class CallOptions:
    """The arguments that every collective takes: see :mod:`dist_prims.collectives`."""

    algorithm: str | None
    async_op: bool
    segment_bytes: int


@dataclass
class Call:
    """The description of one call of a collective.

    ``blocks``: the number of elements of each block of the data, or of the data as one block. A block is split into
    chunks evenly. ``source`` and ``target`` are flat tensors by block, or None where this rank has none. ``common``
    contains the lengths on which all ranks must agree: in number and, by checksum, in each value. ``even``: whether all
    blocks have the same length. ``after``: functions to call when the collective has completed.
    """

    collective: str
    group: dist.ProcessGroup
    like: torch.Tensor
    blocks: Sequence[int]
    source: Sequence[torch.Tensor | None]
    target: Sequence[torch.Tensor | None]
    op: dist.ReduceOp.RedOpType | None = None
    root: int | None = None
    common: Sequence[int] = ()
    even: bool = True
    after: list[Callable[[], object]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The size for the choice of an algorithm, which is the same on every rank."""
        return sum(self.common) * self.like.element_size()


def group_of(group: dist.ProcessGroup | None, what: str) -> dist.ProcessGroup:
    """Return the group to use; ValueError if there is none, or if this process is not a member."""
    if not dist.is_initialized():
        raise ValueError(f"{what}: this process is in no group; call dist_prims.init() first")
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise ValueError(f"{what}: rank {dist.get_rank()} is not a member of the given group")
    return found


def _needs_hosts(call: Call, chosen: AlgorithmRange) -> bool:
    """Whether the algorithm groups the ranks by hosts, and its parameters do not say how."""
    return "hosts" in lookup(call.collective, chosen.algorithm).parameters and "hosts" not in dict(chosen.parameters)


def _schedule(call: Call, chosen: AlgorithmRange, by_hosts: bool = True) -> Schedule:
    """Return the schedule of the chosen algorithm.

    ``by_hosts``: a hierarchical algorithm groups the ranks by the hosts of the group, if these are known. Otherwise it
    groups them by their numbers.
    """
    parameters = {**dict(chosen.parameters), **({} if call.root is None else {"root": call.root})}
    order = known_hosts(call.group) if by_hosts and _needs_hosts(call, chosen) else None
    if order is not None and len(order.hosts) > 1:
        return order.build(call.collective, chosen.algorithm, **parameters)
    return build_shared(call.collective, chosen.algorithm, call.group.size(), **parameters)


# Schedules are shared objects, so these caches compute once for each schedule. A schedule is another object after an
# algorithm has been registered again.
_program: Callable[[Schedule, int], Program] = functools.lru_cache(maxsize=512)(compile_program)
_compiled: Callable[[Schedule, int, int], Any] = functools.lru_cache(maxsize=512)(compiled)
_WIDTH = 40  # of the name of an algorithm in a header


@functools.lru_cache(maxsize=512)
def _name(schedule: Schedule) -> str:
    return name_to_compare(schedule, schedule.algorithm, _WIDTH)


def perform(call: Call, options: CallOptions) -> Work | None:
    """Make a call by the backend or by a schedule. Return the Work to wait for if it is asynchronous, else None."""
    rank, size = call.group.rank(), call.group.size()
    what = f"{call.collective} on rank {rank}"
    chosen = None
    if options.algorithm not in (None, CHEAPEST):
        chosen = named_algorithm(options.algorithm, call.collective, what, call.nbytes)
    elif options.algorithm is None and not is_on_dist_prims(call):
        chosen = configured_algorithm(call.collective, call.nbytes)
    if chosen is None:
        if is_on_dist_prims(call) and call.collective not in ("scan", "exclusive_scan"):
            return run_in_backend(call, options.async_op)
        if options.algorithm is None and not options.segment_bytes and is_for_gloo(call):
            return run_over_gloo(call, options.async_op)
        chosen = AlgorithmRange(cheapest(call.collective, size, call.nbytes, call.even))
    if not call.even and chosen.algorithm not in UNFORWARDED:
        raise ValueError(
            f"{what}: algorithm {chosen.algorithm!r} forwards blocks of other ranks, whose lengths this rank does not "
            f"know; with splits or lists use {' or '.join(UNFORWARDED)}"
        )
    # Ranks of other groups exchange their hosts on the thread of the queue. Nothing here may depend on whether this
    # rank has done so yet: ranks would cut into other segments, or one would raise before the call has a number.
    schedule = _schedule(call, chosen, by_hosts=is_on_dist_prims(call))
    if is_on_dist_prims(call) and call.collective in FOLLOWED:
        return run_in_backend(call, options.async_op, *_native_form(schedule, rank, chosen.segments))
    segment_bytes = functools.partial(_segment_bytes, call, options.segment_bytes, chosen.segments)
    what = f"{call.collective} ({chosen.algorithm}) on rank {rank}"
    job = functools.partial(_job, call, segment_bytes, chosen)
    queue = queue_of(call.group)
    if options.async_op:
        return queue.start(_on_a_stream(job, call.like.device), what)
    queue.run(job, what)
    return None


def _native_form(schedule: Schedule, rank: int, segments: int) -> tuple[Any, Callable[[], None] | None]:
    """Return the schedule in the form that the backend executes, and what it calls when all ranks have agreed.

    A schedule that cannot be compiled raises only then, because the registrations of other ranks may differ.
    """
    require = None if is_trusted(schedule) else functools.partial(require_proof, schedule, rank)
    try:
        return _compiled(schedule, rank, segments), require
    except Exception as found:
        error = found

    def refuse() -> None:
        if require is not None:
            require()
        raise error

    return compiled_without_steps(schedule, rank), refuse


def _segment_bytes(call: Call, given: int, segments: int, schedule: Schedule) -> int:
    """The bytes of a segment: ``given``, or a chunk divided by ``segments``; 0 if chunks are sent whole."""
    if given or segments == 1:
        return given
    return max(math.ceil(call.nbytes * schedule.share / segments), 1)


def _on_a_stream(job: Callable[[int], None], device: torch.device) -> Callable[[int], None]:
    """On CUDA, run the job on a stream of its own, after the kernels that the caller has queued so far."""
    if device.type != "cuda":
        return job
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))

    def run(number: int) -> None:
        with torch.cuda.stream(stream):
            job(number)
            stream.synchronize()

    return run


@torch.no_grad()
def _job(call: Call, segment_bytes: Callable[[Schedule], int], chosen: AlgorithmRange, number: int) -> None:
    if _needs_hosts(call, chosen) and known_hosts(call.group) is None:
        schedule = _schedule(call, chosen)
        _agree(call, segment_bytes(schedule), schedule, number)
        channel = Channel(call.group, _AGREEMENT_TAG, timeout_of(call.group, call.like.device))
        exchange_hosts(channel, call.group, call.like.device)
    schedule = _schedule(call, chosen)
    run = functools.partial(_execute, call, segment_bytes(schedule), schedule, number)
    if recorder.active is None:
        run()
        return
    traced(run, call.group, number, call.collective, schedule_name(schedule), call.nbytes, call.root)


def _agree(call: Call, segment_bytes: int, schedule: Schedule, number: int) -> None:
    channel = Channel(call.group, _AGREEMENT_TAG, timeout_of(call.group, call.like.device))
    agree(channel, call.group, _header(call, segment_bytes, schedule, number), call.like.device)


def _execute(call: Call, segment_bytes: int, schedule: Schedule, number: int) -> None:
    begin = recorder.started()
    _agree(call, segment_bytes, schedule, number)
    recorder.record(fmt.AGREE, begin)
    rank, timeout = call.group.rank(), timeout_of(call.group, call.like.device)
    require_proof(schedule, rank)
    call = without_overlap(call)
    slices = _slices(call, schedule)
    lengths = [length for block in _chunk_lengths(call, schedule) for length in block]
    segment = max(segment_bytes // call.like.element_size(), 1) if segment_bytes else 0
    channel = Channel(call.group, _DATA_TAG + number % _TAGS, timeout)
    op = dist.ReduceOp.SUM if call.op is None else call.op
    Executor(channel, slices, lengths, call.like, op, call.group.size(), segment).run(_program(schedule, rank))
    for each in call.after:
        each()


def _header(call: Call, segment_bytes: int, schedule: Schedule, number: int) -> Header:
    common = ",".join(map(str, call.common)).encode()
    return Header(
        sequence=number,
        collective=call.collective,
        op="" if call.op is None else OP_NAMES[call.op],
        dtype=str(call.like.dtype).removeprefix("torch."),
        count=sum(call.common),
        root=-1 if call.root is None else call.root,
        layout=zlib.crc32(common) if len(call.common) > 1 else 0,
        algorithm=_name(schedule),
        parameters=",".join(f"{key}={value}" for key, value in schedule.parameters),
        segment=str(segment_bytes) if segment_bytes else "",
    )


def without_overlap(call: Call) -> Call:
    """Return a call in which no target overlaps a source or another target: the call itself, or one with new targets.

    A schedule would otherwise overwrite a source before it is sent. A target may be the source of its own block. New
    targets are copied to the targets of the call at its end, in the order of the blocks.
    """
    ranges: list[tuple[int, int, bool]] = []  # addresses, and whether a target is there
    for read, written in zip(call.source, call.target, strict=True):
        if read is not None and (written is None or _range(read) != _range(written)):
            ranges.append((*_range(read), False))
        if written is not None:
            ranges.append((*_range(written), True))
    end = end_of_targets = 0
    for begin, stop, is_target in sorted(each for each in ranges if each[0] < each[1]):
        if begin < (end if is_target else end_of_targets):
            return _staged(call)
        end = max(end, stop)
        end_of_targets = max(end_of_targets, stop) if is_target else end_of_targets
    return call


def _range(flat: torch.Tensor) -> tuple[int, int]:
    return flat.data_ptr(), flat.data_ptr() + flat.nbytes


def _staged(call: Call) -> Call:
    staged = [None if each is None else torch.empty_like(each) for each in call.target]

    def deliver() -> None:
        for target, result in zip(call.target, staged, strict=True):
            if target is not None and result is not None:
                target.copy_(result)

    return replace(call, target=staged, after=[deliver, *call.after])


def _chunk_lengths(call: Call, schedule: Schedule) -> list[list[int]]:
    """Lengths of the chunks of each block. An all_to_all lists its blocks twice: as input and as output."""
    blocks = len(call.blocks) // 2 if call.collective == "all_to_all" else len(call.blocks)
    return [split_evenly(count, schedule.chunks // blocks) for count in call.blocks]


def _slices(call: Call, schedule: Schedule) -> dict[int, ChunkSlice]:
    """The memory of each chunk of this rank before the first step.

    A chunk is in the target where the rank has one, else in the source, which the executor then does not write.
    """
    slices: dict[int, ChunkSlice] = {}
    start_chunks = set(schedule.contract.start(call.group.rank()).chunk.tolist())
    number = 0
    for block, lengths in enumerate(_chunk_lengths(call, schedule)):
        source, target = call.source[block], call.target[block]
        if source is not None and target is not None and source.data_ptr() != target.data_ptr():
            target.copy_(source)
        flat = source if target is None else target
        at = 0
        for length in lengths:
            if flat is not None and (target is not None or number in start_chunks):
                slices[number] = ChunkSlice(flat, at, at + length, writable=target is not None)
            at += length
            number += 1
    return slices
