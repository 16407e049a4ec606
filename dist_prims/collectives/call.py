"""One call of a collective, whichever it is: check, choose, agree, execute.

The collectives differ in where a rank's data lies and how it is split, and in nothing else. So each of them only
describes itself as a Call, and this module does the rest once.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..schedules import Schedule, build, lookup
from ..schedules.program import Program, compile_program
from .agree import Header, agree
from .channel import Channel
from .choose import choose
from .execute import Executor, Place
from .flat import split_evenly
from .lane import Work, lane_of
from .reduction import OP_NAMES, finish

__all__ = ["Call", "Options", "group_of", "perform"]

_AGREEMENT_TAG, _DATA_TAG, _TAGS = 0x5D00, 0x5D01, 1 << 20


@dataclass(frozen=True)
class Options:
    """What every collective takes: see :mod:`dist_prims.collectives`."""

    algorithm: str | None
    async_op: bool
    segment_bytes: int
    parameters: dict[str, Any]


@dataclass
class Call:
    """A collective as its caller meant it.

    ``blocks``: elements of each block of the data (a block is split into chunks evenly), or of the whole. ``source``
    and ``target`` are flat tensors by block; ``None`` where this rank has none. ``common`` is what all ranks must
    agree on of the lengths: their number and, by checksum, each.
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
        """What the choice of an algorithm goes by; the same on every rank."""
        return sum(self.common) * self.like.element_size()


def group_of(group: dist.ProcessGroup | None, what: str) -> dist.ProcessGroup:
    """The group to use; ValueError where there is none, or where this process is not in it."""
    if not dist.is_initialized():
        raise ValueError(f"{what}: this process is in no group; call dist_prims.init() first")
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise ValueError(f"{what}: rank {dist.get_rank()} is not a member of the given group")
    return found


@functools.lru_cache(maxsize=512)
def _plan(
    collective: str, algorithm: str, size: int, root: int | None, parameters: tuple[tuple[str, Any], ...], rank: int
) -> tuple[Schedule, Program]:
    rooted = {} if root is None else {"root": root}
    schedule = build(collective, algorithm, size, **rooted, **dict(parameters))
    return schedule, compile_program(schedule, rank)


def perform(call: Call, options: Options) -> Work | None:
    """Run a call now, or hand it to its group's lane: the Work to wait for, or None."""
    rank, size = call.group.rank(), call.group.size()
    algorithm = options.algorithm or choose(call.collective, size, call.nbytes, call.even)
    lookup(call.collective, algorithm)
    parameters = tuple((name, _hashable(value)) for name, value in sorted(options.parameters.items()))
    schedule, program = _plan(call.collective, algorithm, size, call.root, parameters, rank)
    what = f"{call.collective} ({algorithm}) on rank {rank}"
    job = functools.partial(_job, call, options.segment_bytes, schedule, program)
    lane = lane_of(call.group)
    if options.async_op:
        return lane.start(_on_a_stream(job, call.like.device), what)
    lane.run(job)
    return None


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _on_a_stream(job: Callable[[int], None], device: torch.device) -> Callable[[int], None]:
    """On CUDA: after what the caller has queued so far, on a stream of its own."""
    if device.type != "cuda":
        return job
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))

    def run(number: int) -> None:
        with torch.cuda.stream(stream):
            job(number)
            stream.synchronize()

    return run


@torch.no_grad()
def _job(call: Call, segment_bytes: int, schedule: Schedule, program: Program, number: int) -> None:
    timeout = _timeout(call)
    agree(
        Channel(call.group, _AGREEMENT_TAG, timeout),
        call.group,
        _header(call, segment_bytes, schedule, number),
        call.like.device,
    )
    places = _places(call, schedule)
    length = _lengths(call, schedule)
    segment = max(segment_bytes // call.like.element_size(), 1) if segment_bytes else 0
    channel = Channel(call.group, _DATA_TAG + number % _TAGS, timeout)
    op = dist.ReduceOp.SUM if call.op is None else call.op
    executor = Executor(channel, places, length, call.like, op, segment)
    executor.run(program)
    _deliver(call, schedule, executor)
    for each in call.after:
        each()


def _timeout(call: Call) -> timedelta:
    options = getattr(call.group._get_backend(call.like.device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else dist.default_pg_timeout


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
        algorithm=schedule.algorithm,
        parameters=",".join(f"{key}={value}" for key, value in schedule.parameters),
        segment=str(segment_bytes) if segment_bytes else "",
    )


def _chunk_lengths(call: Call, schedule: Schedule) -> list[list[int]]:
    """Lengths of the chunks of each block."""
    per_block = 1 if call.collective == "all_to_all" else schedule.chunks // len(call.blocks)
    return [split_evenly(count, per_block) for count in call.blocks]


def _lengths(call: Call, schedule: Schedule) -> Callable[[int], int]:
    """Elements of a piece, by its number."""
    if call.collective != "all_to_all":
        flat = [length for block in _chunk_lengths(call, schedule) for length in block]
        return flat.__getitem__
    rank, size = call.group.rank(), call.group.size()
    sent, received = call.blocks[:size], call.blocks[size:]
    # Piece s * size + d goes from s to d. Pieces of others pass through here only where all are equally long.
    return lambda piece: sent[piece % size] if piece // size == rank else received[piece // size]


def _places(call: Call, schedule: Schedule) -> dict[int, Place]:
    """Where each chunk of this rank lies before the first step: in the target where the rank has one, else in the
    source, which then is not written to."""
    places: dict[int, Place] = {}
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
                places[number] = Place(flat, at, at + length, writable=target is not None)
            at += length
            number += 1
    return places


def _deliver(call: Call, schedule: Schedule, executor: Executor) -> None:
    """Divide what is to be a mean. The executor has left every output chunk in the target."""
    if call.op is None:
        return
    ends = schedule.contract.end(call.group.rank()).chunk.tolist()
    for chunk in ends:
        finish(call.op, executor.places[chunk].view, call.group.size())
