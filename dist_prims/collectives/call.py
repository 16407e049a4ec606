"""One call of a collective, whichever it is: check, choose, agree, execute.

The collectives differ in where a rank's data lies and how it is split, and in nothing else. So each of them only
describes itself as a Call, and this module does the rest once.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..schedules import Schedule, build, lookup
from ..schedules.native import FOLLOWED
from ..schedules.program import Program, compile_program
from ..schedules.registry import Algorithm
from ..schedules.trust import is_trusted
from ..torch_compat import timeout_of
from .algorithm_choice import CHEAPEST, cheapest, configured
from .call_agreement import Header, agree
from .channel import Channel
from .execute import Executor, Place
from .flat import split_evenly
from .native import NativeWork, compiled, is_of_dist_prims, run_in_backend, run_natively, serves
from .proofs import proofs_of
from .queue import Work, queue_of
from .reduction import OP_NAMES

__all__ = ["AnyWork", "Call", "Options", "group_of", "perform"]

# Data tags are used in turn, one for each call. No rank passes the agreement on a call before all have ended the call
# before, so one would do; more keep the messages of a call that failed apart. All are below 32,767, which every MPI has
# as a tag, and below those that a group across hosts has for itself.
_AGREEMENT_TAG, _DATA_TAG, _TAGS = 0x5D00, 0x5D01, 1 << 12


AnyWork = Work | NativeWork


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
    registered: Algorithm, size: int, root: int | None, parameters: tuple[tuple[str, Any], ...], rank: int
) -> tuple[Schedule, Program]:
    rooted = {} if root is None else {"root": root}
    schedule = build(registered.collective, registered.name, size, **rooted, **dict(parameters))
    return schedule, compile_program(schedule, rank)


@functools.lru_cache(maxsize=512)
def _compiled(*shape: Any) -> Any:
    """The schedule as the backend executes it."""
    schedule, _ = _plan(*shape)
    return compiled(schedule, shape[-1])


def perform(call: Call, options: Options) -> AnyWork | None:
    """Make a call natively or by a schedule, now or asynchronously: the Work to wait for, or None."""
    rank, size = call.group.rank(), call.group.size()
    algorithm = options.algorithm or configured(call.collective, call.nbytes)
    if algorithm is None or algorithm == CHEAPEST:
        if options.parameters:
            raise ValueError(
                f"{call.collective} on rank {rank}: unknown argument {', '.join(options.parameters)}; parameters of an "
                "algorithm need its name (algorithm=)"
            )
        if serves(call) and (is_of_dist_prims(call) or (algorithm is None and not options.segment_bytes)):
            return run_natively(call, options.async_op)
        algorithm = cheapest(call.collective, size, call.nbytes, call.even)
    parameters = tuple((name, _hashable(value)) for name, value in sorted(options.parameters.items()))
    shape = (lookup(call.collective, algorithm), size, call.root, parameters, rank)
    schedule, program = _plan(*shape)
    if is_of_dist_prims(call) and call.collective in FOLLOWED:
        require = functools.partial(proofs_of(call.group).require, schedule, timeout_of(call.group, call.like.device))
        return run_in_backend(call, _compiled(*shape), None if is_trusted(schedule) else require, options.async_op)
    what = f"{call.collective} ({algorithm}) on rank {rank}"
    job = functools.partial(_job, call, options.segment_bytes, schedule, program)
    queue = queue_of(call.group)
    if options.async_op:
        return queue.start(_on_a_stream(job, call.like.device), what)
    queue.run(job, what)
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
    timeout = timeout_of(call.group, call.like.device)
    agree(
        Channel(call.group, _AGREEMENT_TAG, timeout),
        call.group,
        _header(call, segment_bytes, schedule, number),
        call.like.device,
    )
    proofs_of(call.group).require(schedule, timeout)
    places = _places(call, schedule)
    length = _lengths(call, schedule)
    segment = max(segment_bytes // call.like.element_size(), 1) if segment_bytes else 0
    channel = Channel(call.group, _DATA_TAG + number % _TAGS, timeout)
    op = dist.ReduceOp.SUM if call.op is None else call.op
    Executor(channel, places, length, call.like, op, call.group.size(), segment).run(program)
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
        algorithm=schedule.algorithm,
        parameters=",".join(f"{key}={value}" for key, value in schedule.parameters),
        segment=str(segment_bytes) if segment_bytes else "",
    )


def _chunk_lengths(call: Call, schedule: Schedule) -> list[list[int]]:
    """Lengths of the chunks of each block. An all_to_all names its blocks twice: as input and as output."""
    blocks = len(call.blocks) // 2 if call.collective == "all_to_all" else len(call.blocks)
    return [split_evenly(count, schedule.chunks // blocks) for count in call.blocks]


def _lengths(call: Call, schedule: Schedule) -> Callable[[int], int]:
    """Elements of a piece, by its number."""
    lengths = _chunk_lengths(call, schedule)
    if call.collective != "all_to_all":
        flat = [length for block in lengths for length in block]
        return flat.__getitem__
    rank, size = call.group.rank(), call.group.size()
    sent, received = lengths[:size], lengths[size:]
    parts = schedule.chunks // size

    def length(piece: int) -> int:
        """Part ``piece % parts`` of the block from rank ``src`` to ``dst``. Blocks of other ranks pass through here
        only where all are equally long."""
        pair, part = divmod(piece, parts)
        src, dst = divmod(pair, size)
        return (sent[dst] if src == rank else received[src])[part]

    return length


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
