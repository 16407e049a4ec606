"""Timing of contenders (calls that are compared) side by side: disturbances of the machine affect all of them equally.

Each iteration runs every contender once, in an order that rotates by one. Before each run the buffer gets new values
and the ranks pass a barrier. Small data is called many times in a row, since the barrier would hide the time of one
call. The time of a run is the time of its slowest rank; the result is the median over the iterations. Two contenders
are compared by the median of their ratios, iteration by iteration, because absolute times of two programs on a shared
machine say little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .cases import Buffers, Case, case_of, contenders

__all__: list[str] = []

_SMALL, _CALLS_IN_A_ROW = 64 * 1024, 50  # a run of data of up to _SMALL bytes makes this many calls
_LEAST_TICKS = 20  # of all cores: fewer are too coarse


@dataclass
class Line:
    """The result of one contender at one size."""

    collective: str
    contender: str
    nbytes: int  # of the larger buffer of a rank
    count: int  # the elements of that buffer
    dtype: str
    op: str
    seconds: list[float] = field(default_factory=list)  # of one call, by iteration
    wrong: int = 0  # elements, on all ranks and in all iterations
    ratio: float = 1.0  # its time divided by the time of the group's own collective
    busy: float | None = None  # the part of the time of all cores in which they worked; None for short runs

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def bandwidth(self, factor: float = 1.0) -> float:
        """The bandwidth in GB/s, times ``factor``."""
        return factor * self.nbytes / self.median / 1e9

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "median": self.median}


@dataclass(frozen=True)
class Contender:
    """A call, its buffers, and whether the result in them is checked."""

    call: Callable[[Buffers], Any]
    buffers: Buffers
    checked: bool = True


def iterations_for(nbytes: int) -> int:
    """The default number of iterations: more for faster runs; 11 for small data, whose runs are averages already."""
    return 11 if nbytes <= _SMALL else max(7, min(101, 2**26 // nbytes))


def measure(
    collective: str,
    nbytes: int,
    names: list[str],
    dtype: torch.dtype = torch.float32,
    iterations: int | None = None,
    warmup: int = 2,
    segment_bytes: int = 0,
    groups: Mapping[str, dist.ProcessGroup | None] | None = None,
    more: Callable[[Buffers], Mapping[str, Contender]] | None = None,
) -> list[Line]:
    """Measure a collective, and return a line for each contender, the same on every rank. Every rank must call it.

    Args:
        nbytes: of the data, as ``stream.least_bytes`` counts it.
        names: of the algorithms to measure, with segments of ``segment_bytes``.
        iterations: None: more for faster runs. ``warmup`` iterations come before them, and are not timed.
        groups: to measure beside the default group, by name.
        more: makes further contenders from the buffers.
    """
    # 1. Buffers of the largest length that the case needs on this rank.
    case, size = case_of(collective), dist.get_world_size()
    count = nbytes // dtype.itemsize
    shape = case.shape(count, size)
    buffers = Buffers(dist.get_rank(), size, *(torch.zeros(length, dtype=dtype) for length in shape))
    # 2. The contenders, all on the same buffers.
    all_groups = {dist.get_backend(): None, **(groups or {})}
    calls_of = contenders(collective, names, all_groups, segment_bytes=segment_bytes)
    runs = {name: Contender(call, buffers) for name, call in calls_of.items()} | dict(more(buffers) if more else {})
    calls = _CALLS_IN_A_ROW if nbytes <= _SMALL else 1
    barrier_group = next((group for name, group in all_groups.items() if name != "gloo"), None)  # gloo's is the slowest
    run = _Run(case, calls, barrier_group)
    moved = max(shape) * dtype.itemsize
    # 3. Rounds, in which each contender runs once. The first one changes, so that none always follows the same other
    #    one.
    ticks: list[list[Ticks]] = [[] for _ in runs]
    lines = [Line(collective, name, moved, max(shape), str(dtype).removeprefix("torch."), case.op) for name in runs]
    for round in range(-warmup, iterations or iterations_for(nbytes)):
        order = [*range(len(lines))]
        order = order[round % len(order) :] + order[: round % len(order)]
        for number in order:
            seconds, used, wrong = run(runs[lines[number].contender], round + number)
            if round >= 0:
                lines[number].seconds.append(seconds)
                lines[number].wrong += wrong
                ticks[number].append(used)
    # 4. How busy the machine was, and the lines of all ranks.
    for line, own in zip(lines, ticks, strict=True):
        passed = sum(each.passed for each in own)
        line.busy = sum(each.working for each in own) / passed if passed >= _LEAST_TICKS else None
    _combine_ranks(lines)
    return lines


class Ticks(NamedTuple):
    """The time of all cores of the machine, in the kernel's unit of 10 ms."""

    working: int
    passed: int

    @classmethod
    def since_the_start(cls) -> Ticks:
        """Read the ticks since the machine was started, without the time that a hypervisor took."""
        user, nice, system, idle, waiting, *others = map(int, Path("/proc/stat").read_text().split()[1:8])
        working = user + nice + system + sum(others)
        return cls(working, working + idle + waiting)

    def since(self, earlier: Ticks) -> Ticks:
        return Ticks(self.working - earlier.working, self.passed - earlier.passed)


@dataclass
class _Run:
    """Timing of single runs; the ranks pass a barrier of ``barrier_group`` before each."""

    case: Case
    calls: int
    barrier_group: dist.ProcessGroup | None

    def __call__(self, contender: Contender, round: int) -> tuple[float, Ticks, int]:
        """The seconds of a call, the ticks of all calls, and the number of wrong elements. Of calls in a row only the
        first is checked."""
        buffers = contender.buffers
        buffers.input.copy_(buffers.value(buffers.rank, round, len(buffers.input)))
        buffers.output.zero_()
        timed = self._timed(contender, 1)
        wrong = self.case.wrong(buffers, round) if contender.checked else 0
        return *(self._timed(contender, self.calls) if self.calls > 1 else timed), wrong

    def _timed(self, contender: Contender, calls: int) -> tuple[float, Ticks]:
        """The seconds of one call, and the ticks of all calls."""
        dist.barrier(group=self.barrier_group)
        before = Ticks.since_the_start()
        began = time.perf_counter()
        for _ in range(calls):
            contender.call(contender.buffers)
        seconds = (time.perf_counter() - began) / calls
        dist.barrier(group=self.barrier_group)  # a rank that is done must not take a core from one that is not
        return seconds, Ticks.since_the_start().since(before)


def _combine_ranks(lines: list[Line]) -> None:
    """Combine the lines of all ranks: the slowest rank's times, the sum of the wrong elements, the busiest host."""
    times = torch.tensor([line.seconds for line in lines], dtype=torch.float64)
    wrong = torch.tensor([line.wrong for line in lines])
    busy = torch.tensor([-1.0 if line.busy is None else line.busy for line in lines])
    dist.all_reduce(times, dist.ReduceOp.MAX)
    dist.all_reduce(wrong)
    dist.all_reduce(busy, dist.ReduceOp.MAX)
    for line, seconds, errors, work in zip(lines, times.tolist(), wrong.tolist(), busy.tolist(), strict=True):
        line.seconds, line.wrong, line.busy = seconds, errors, work if work >= 0 else None
        line.ratio = statistics.median(own / first for own, first in zip(seconds, times[0].tolist(), strict=True))
