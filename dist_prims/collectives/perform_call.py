"""Performs a call of a collective: chooses an algorithm, lets all ranks compare their calls, and executes.

perform()            on the caller's thread: the choice; then one of
  run_in_backend()     the backend dist_prims: its own collective, or the schedule in C++ (``backend_calls.py``)
  run_over_gloo()      gloo's own collective (``backend_calls.py``)
  _run_schedule()      a schedule in Python over any backend, in its turn in the queue of the group (``queue.py``):
    _agree()             all ranks compare the call (``call_agreement.py``)
    _execute()           this rank's part of the schedule (``program_executor.py``)
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable
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
from .call import Call
from .call_agreement import CallHeader, agree_on_call
from .channel import Channel
from .flat import split_evenly
from .group_hosts import exchange_hosts, known_hosts
from .program_executor import ChunkSlice, ProgramExecutor
from .proof_before_use import require_proof
from .queue import Work, queue_of
from .reduction import OP_NAMES
from .traced_call import traced

__all__: list[str] = []

# Calls use the data tags in turn. One data tag would be sufficient, because no rank completes the agreement on a call
# before all ranks have ended the previous call; several tags separate the messages of a call that failed. All tags are
# below 32,767, which every MPI supports as a tag, and below the tags that a multi-host group reserves.
_AGREEMENT_TAG, _DATA_TAG, _TAGS = 0x5D00, 0x5D01, 1 << 12
_WIDTH = 40  # of the name of an algorithm in a header, in bytes

# Schedules are shared objects, so these caches compute once for each schedule. A schedule is another object after an
# algorithm has been registered again.
_program: Callable[[Schedule, int], Program] = functools.lru_cache(maxsize=512)(compile_program)
_compiled: Callable[[Schedule, int, int], Any] = functools.lru_cache(maxsize=512)(compiled)
_name_in_header: Callable[[Schedule, str, int], str] = functools.lru_cache(maxsize=512)(name_to_compare)


def perform(call: Call) -> Work | None:
    """Perform a call. Return the Work to wait for if it is asynchronous, else None."""
    options, on_dist_prims = call.options, is_on_dist_prims(call)
    # 1. The algorithm that the call names, or the environment. A group of dist_prims has read the environment itself.
    chosen = None
    if options.algorithm not in (None, CHEAPEST):
        chosen = named_algorithm(options.algorithm, call.collective, call.title, call.nbytes)
    elif options.algorithm is None and not on_dist_prims:
        chosen = configured_algorithm(call.collective, call.nbytes)
    # 2. If there is none, or "cheapest": the collective of the group's own backend, in which dist_prims chooses the
    # cheapest schedule itself; otherwise the cheapest algorithm.
    if chosen is None:
        if on_dist_prims and call.collective not in ("scan", "exclusive_scan"):
            return run_in_backend(call)
        if options.algorithm is None and not options.segment_bytes and is_for_gloo(call):
            return run_over_gloo(call)
        chosen = AlgorithmRange(cheapest(call.collective, call.size, call.nbytes, call.even))
    if not call.even and chosen.algorithm not in UNFORWARDED:
        raise ValueError(
            f"{call.title}: algorithm {chosen.algorithm!r} forwards blocks of other ranks, whose lengths this rank "
            f"does not know; with splits or lists use {' or '.join(UNFORWARDED)}"
        )
    # 3. The schedule of the algorithm. An error of its parameters raises here, before the call has a number. On another
    # backend than dist_prims this is only a check: the call builds its schedule in its turn in the queue, where the
    # ranks first exchange their hosts. Until then a rank may not know them, so this check does not use them.
    schedule = _schedule(call, chosen, by_hosts=on_dist_prims)
    # 4. The backend dist_prims executes it in C++; otherwise it is executed in Python.
    if on_dist_prims and call.collective in FOLLOWED:
        return run_in_backend(call, *_native_form(schedule, call.rank, chosen.segments))
    title = f"{call.collective} ({chosen.algorithm}) on rank {call.rank}"
    job = functools.partial(_run_schedule, call, chosen)
    queue = queue_of(call.group)
    if options.async_op:
        return queue.start(_on_a_stream(job, call.like.device), title)
    queue.run(job, title)
    return None


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
    return build_shared(call.collective, chosen.algorithm, call.size, **parameters)


def _native_form(schedule: Schedule, rank: int, segments: int) -> tuple[Any, Callable[[], None] | None]:
    """Return the schedule in the form that the backend executes, and what it calls when all ranks have agreed.

    A schedule that cannot be compiled raises only then, because the registrations of other ranks may differ.
    """
    require = None if is_trusted(schedule) else functools.partial(require_proof, schedule, rank)
    try:
        return _compiled(schedule, rank, segments), require
    except Exception as caught:
        error = caught

    def refuse() -> None:
        if require is not None:
            require()
        raise error

    return compiled_without_steps(schedule, rank), refuse


def _segment_bytes(call: Call, chosen: AlgorithmRange, schedule: Schedule) -> int:
    """The bytes of a segment: the option, or a chunk divided by the chosen segments; 0 if chunks are sent whole."""
    if call.options.segment_bytes or chosen.segments == 1:
        return call.options.segment_bytes
    return max(math.ceil(call.nbytes * schedule.share / chosen.segments), 1)


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
def _run_schedule(call: Call, chosen: AlgorithmRange, number: int) -> None:
    """Run the chosen algorithm in Python, as the job of the queue. ``number`` counts the calls of the group."""
    if _needs_hosts(call, chosen) and known_hosts(call.group) is None:
        # The exchange of hosts needs messages, so the ranks first agree that all of them make this call.
        _agree(call, chosen, _schedule(call, chosen), number)
        exchange_hosts(_channel(call, _AGREEMENT_TAG), call.group, call.like.device)
    schedule = _schedule(call, chosen)
    run = functools.partial(_execute, call, chosen, schedule, number)
    if recorder.active is None:
        run()
    else:
        traced(run, call, number, schedule_name(schedule))


def _channel(call: Call, tag: int) -> Channel:
    return Channel(call.group, tag, timeout_of(call.group, call.like.device))


def _agree(call: Call, chosen: AlgorithmRange, schedule: Schedule, number: int) -> None:
    segment_bytes = _segment_bytes(call, chosen, schedule)
    header = CallHeader(
        sequence=number,
        collective=call.collective,
        op="" if call.op is None else OP_NAMES[call.op],
        dtype=str(call.like.dtype).removeprefix("torch."),
        count=sum(call.common),
        root=-1 if call.root is None else call.root,
        layout=zlib.crc32(",".join(map(str, call.common)).encode()) if len(call.common) > 1 else 0,
        algorithm=_name_in_header(schedule, schedule.algorithm, _WIDTH),
        parameters=",".join(f"{key}={value}" for key, value in schedule.parameters),
        segment=str(segment_bytes) if segment_bytes else "",
    )
    agree_on_call(_channel(call, _AGREEMENT_TAG), call.group, header, call.like.device)


def _execute(call: Call, chosen: AlgorithmRange, schedule: Schedule, number: int) -> None:
    # 1. All ranks make the same call, and the schedule is correct. No data is touched before.
    begin = recorder.started()
    _agree(call, chosen, schedule, number)
    recorder.record(fmt.AGREE, begin)
    require_proof(schedule, call.rank)
    # 2. The memory of the chunks, and the steps of this rank.
    separate = call.without_overlap()
    slices = _slices(separate, schedule)
    lengths = [length for block in _chunk_lengths(call, schedule) for length in block]
    segment_bytes = _segment_bytes(call, chosen, schedule)
    segment = max(segment_bytes // call.like.element_size(), 1) if segment_bytes else 0
    channel = _channel(call, _DATA_TAG + number % _TAGS)
    op = dist.ReduceOp.SUM if call.op is None else call.op
    executor = ProgramExecutor(channel, slices, lengths, call.like, op, call.size, segment)
    executor.run(_program(schedule, call.rank))
    # 3. Results that are not yet in the tensors of the user are copied there.
    for finish in separate.after:
        finish()


def _chunk_lengths(call: Call, schedule: Schedule) -> list[list[int]]:
    """Lengths of the chunks of each block. An all_to_all lists its blocks twice: as input and as output."""
    blocks = len(call.blocks) // 2 if call.collective == "all_to_all" else len(call.blocks)
    return [split_evenly(count, schedule.chunks // blocks) for count in call.blocks]


def _slices(call: Call, schedule: Schedule) -> dict[int, ChunkSlice]:
    """The memory of each chunk of this rank before the first step, by the number of the chunk.

    A chunk is in the target where the rank has one, else in the source, which the executor then does not write.
    """
    slices: dict[int, ChunkSlice] = {}
    start_chunks = set(schedule.contract.start(call.rank).chunk.tolist())
    number = 0
    for block, lengths in enumerate(_chunk_lengths(call, schedule)):
        source, target = call.source[block], call.target[block]
        if source is not None and target is not None and source.data_ptr() != target.data_ptr():
            target.copy_(source)
        flat = source if target is None else target
        start = 0
        for length in lengths:
            if flat is not None and (target is not None or number in start_chunks):
                slices[number] = ChunkSlice(flat, start, start + length, writable=target is not None)
            start += length
            number += 1
    return slices
