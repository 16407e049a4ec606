"""The memory of the ranks of an MSCCL or MSCCL++ schedule, for the machines that execute one in the tests.

A value is the index of a piece of the data with the ranks whose contributions it contains.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from dist_prims.schedules import Schedule, ScheduleError

Value = tuple[int, tuple[int, ...]]
MemoryPlace = tuple[str, int]


class WrongError(Exception):
    """The machine has read what was never written, added what does not belong together, or cannot run the file."""


class BufferMemory:
    """The buffers i, o and s of each rank."""

    def __init__(self, collective: str, chunks: int, in_place: bool, scratch: list[int]) -> None:
        self.collective, self.chunks, self.in_place, self.scratch = collective, chunks, in_place, scratch
        self.size = len(scratch)
        self.block = chunks // self.size
        self.failed = False  # whether something was read that was never written, or added that does not belong together

    def place(self, rank: int, buffer: str, index: int) -> MemoryPlace:
        """The memory of ``buffer[index]``: in place, the smaller of the buffers i and o is a part of the other."""
        whole = {"allgather": "o", "reducescatter": "i"}.get(self.collective)
        length = self.block if whole and buffer in "io" and buffer != whole else self.chunks
        if buffer == "s":
            length = self.scratch[rank]
        if not 0 <= index < length:
            raise WrongError(f"{buffer}[{index}]")
        if not self.in_place or buffer == "s":
            return buffer, index
        return "io", index + (rank * self.block if whole and buffer != whole else 0)

    def start(self, rank: int) -> dict[MemoryPlace, Value]:
        own = range(self.block if self.collective == "allgather" else self.chunks)
        first = rank * self.block if self.collective == "allgather" else 0
        if self.collective == "alltoall":
            first = rank * self.chunks
        return {self.place(rank, "i", index): (first + index, (rank,)) for index in own}

    def result(self, rank: int) -> dict[MemoryPlace, Value]:
        ranks = tuple(range(self.size))
        if self.collective == "reducescatter":
            return {self.place(rank, "o", at): (rank * self.block + at, ranks) for at in range(self.block)}
        values: Callable[[int], Value] = {
            "allreduce": lambda at: (at, ranks),
            "allgather": lambda at: (at, (at // self.block,)),
            "alltoall": lambda at: (
                at // self.block * self.chunks + rank * self.block + at % self.block,
                (at // self.block,),
            ),
        }[self.collective]
        return {self.place(rank, "o", at): values(at) for at in range(self.chunks)}

    def sum_of(self, one: Value, two: Value) -> Value:
        self.failed |= one[0] != two[0] or bool(set(one[1]) & set(two[1]))
        return one[0], tuple(sorted({*one[1], *two[1]}))


def verdict(text: str, path: Path) -> str:
    """The error of an algorithm; empty if it is proved."""
    path.write_text(text)
    try:
        Schedule.load(path)
    except ValueError as error:
        return str(error) if isinstance(error, ScheduleError) else f"refused: {error}"
    return ""


T = TypeVar("T", str, dict[str, Any])


def check_mutants(
    original: T, mutate: Callable[[T, Random], T], agrees: Callable[[T, str, Random], bool], chance: Random, path: Path
) -> None:
    """The machine agrees with the verdicts on 125 files with one mistake each, of which some are refused."""
    verdicts = []
    for _ in range(125):
        changed = mutate(original, chance)
        verdicts.append(verdict(changed if isinstance(changed, str) else json.dumps(changed), path))
        assert agrees(changed, verdicts[-1], chance), (verdicts[-1], changed)
    assert any(verdicts), "no mistake was refused"


def last(late: str) -> Callable[[list[str]], str]:
    """A choice of the first step, but of the step ``late`` only if no other one can run."""
    return lambda ready: next((name for name in ready if name != late), late)
