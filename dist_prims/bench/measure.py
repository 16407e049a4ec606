"""Time contenders side by side, so that what disturbs the machine disturbs them alike.

Each iteration runs every contender once, in an order that turns by one; before each run the buffer gets new values and
the ranks meet. Small ones are called many times in a row, as the time of one is lost in the meeting. The time of a run
is that of its slowest rank; of all iterations the median counts. Two contenders are compared by the median of their
ratios, iteration by iteration: absolute times of two programs on a shared machine say little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .cases import CASES, Buffers, Case, contenders

__all__ = ["Contender", "Line", "iterations_for", "measure"]

_SMALL, _CALLS_IN_A_ROW = 64 * 1024, 50


@dataclass
class Line:
    """One contender at one size."""

    collective: str
    contender: str
    nbytes: int
    count: int
    dtype: str
    op: str
    seconds: list[float] = field(default_factory=list)
    wrong: int = 0
    ratio: float = 1.0  # its time by that of the group's own collective

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def bandwidth(self, factor: float = 1.0) -> float:
        """GB/s."""
        return factor * self.nbytes / self.median / 1e9

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "median": self.median}


@dataclass(frozen=True)
class Contender:
    """A call, the buffers that it works on, and whether they hold the collective's result after it."""

    call: Callable[[Buffers], Any]
    buffers: Buffers
    checked: bool = True


def iterations_for(nbytes: int) -> int:
    """Many for what is quick, enough for a median of what is not, and of rows that are means already."""
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
    """A line for the own collective of the default group and of ``groups``, for each algorithm named and each that
    ``more`` makes of the buffers; the same on every rank."""
    case, size = CASES[collective], dist.get_world_size()
    count = nbytes // dtype.itemsize
    shape = case.shape(count, size)
    buffers = Buffers(dist.get_rank(), size, *(torch.zeros(length, dtype=dtype) for length in shape))
    all_groups = {dist.get_backend(): None, **(groups or {})}
    calls_of = contenders(collective, names, all_groups, segment_bytes=segment_bytes)
    runs = {name: Contender(call, buffers) for name, call in calls_of.items()} | dict(more(buffers) if more else {})
    calls = _CALLS_IN_A_ROW if nbytes <= _SMALL else 1
    run = _Run(case, calls, [*all_groups.values()][-1])
    moved = max(shape) * dtype.itemsize
    lines = [Line(collective, name, moved, max(shape), str(dtype).removeprefix("torch."), case.op) for name in runs]
    for round in range(-warmup, iterations or iterations_for(nbytes)):
        turn = [*range(len(lines))]
        turn = turn[round % len(turn) :] + turn[: round % len(turn)]
        for number in turn:
            seconds, wrong = run(runs[lines[number].contender], round + number)
            if round >= 0:
                lines[number].seconds.append(seconds)
                lines[number].wrong += wrong
    _share(lines)
    return lines


@dataclass
class _Run:
    """Times one call after another; the ranks meet before each by the quickest barrier that they have."""

    case: Case
    calls: int
    meeting: dist.ProcessGroup | None

    def __call__(self, contender: Contender, round: int) -> tuple[float, int]:
        """Seconds a call, and wrong elements. Of a row of calls only the first is checked."""
        buffers = contender.buffers
        buffers.input.copy_(buffers.value(buffers.rank, round, len(buffers.input)))
        buffers.output.zero_()
        seconds = self._timed(contender, 1)
        wrong = self.case.wrong(buffers, round) if contender.checked else 0
        return (self._timed(contender, self.calls) if self.calls > 1 else seconds), wrong

    def _timed(self, contender: Contender, calls: int) -> float:
        dist.barrier(group=self.meeting)
        began = time.perf_counter()
        for _ in range(calls):
            contender.call(contender.buffers)
        seconds = (time.perf_counter() - began) / calls
        dist.barrier(group=self.meeting)  # or who is done first takes the core for the next round from who is not
        return seconds


def _share(lines: list[Line]) -> None:
    """The slowest rank's times, and the wrong elements of all ranks."""
    times = torch.tensor([line.seconds for line in lines], dtype=torch.float64)
    wrong = torch.tensor([line.wrong for line in lines])
    dist.all_reduce(times, dist.ReduceOp.MAX)
    dist.all_reduce(wrong)
    for line, seconds, errors in zip(lines, times.tolist(), wrong.tolist(), strict=True):
        line.seconds, line.wrong = seconds, errors
        line.ratio = statistics.median(own / first for own, first in zip(seconds, times[0].tolist(), strict=True))
