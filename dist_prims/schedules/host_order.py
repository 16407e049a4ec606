"""Ranks in the order of their hosts, and schedules in which the ranks of a host need not be consecutive.

The schedules of a topology number the ranks host by host. Each rank therefore has a *position* in the order of hosts:

    rank      0  1  2  3        on hosts  a  b  a  b
    position  0  2  1  3
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .contract import BLOCKS, ROOTED, contract
from .schedule import Schedule
from .schedule_builder import build_shared
from .steps import Phase, Phases, Step, Steps, most_steps

__all__: list[str] = []


@dataclass(frozen=True)
class HostOrder:
    """The ranks in the order of their hosts: ``rank_at[position]``, and the number of ranks of each host.

    >>> HostOrder.of(["a", "b", "a", "b"])
    HostOrder(rank_at=(0, 2, 1, 3), hosts=(2, 2))
    """

    rank_at: tuple[int, ...]
    hosts: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[str] | Sequence[int]) -> HostOrder:
        ranks = Counter(names)  # in the order of the first rank of each host
        place = {name: place for place, name in enumerate(ranks)}
        return cls(tuple(sorted(range(len(names)), key=lambda rank: place[names[rank]])), tuple(ranks.values()))

    def build(self, collective: str, algorithm: str, **parameters: Any) -> Schedule:
        """The schedule of an algorithm with the parameter ``hosts``, for the ranks as the group numbers them.

        >>> order = HostOrder.of(["a", "b", "a", "b"])
        >>> print(order.build("all_reduce", "hierarchical").order(chunk=0))
        (r0+r2)+(r1+r3)
        """
        if collective in ROOTED:
            parameters["root"] = self.rank_at.index(parameters.get("root", 0))
        return self.renumbered(build_shared(collective, algorithm, len(self.rank_at), hosts=self.hosts, **parameters))

    def renumbered(self, schedule: Schedule) -> Schedule:
        """The schedule with rank ``rank_at[r]`` in place of each rank r; its blocks follow the ranks."""
        return _renumbered(schedule, self.rank_at)


@functools.lru_cache(maxsize=256)
def _renumbered(schedule: Schedule, rank_at: tuple[int, ...]) -> Schedule:
    if rank_at == tuple(range(schedule.size)):
        return schedule
    renumber = _renumbering(schedule, np.asarray(rank_at))

    def steps() -> Iterator[Step] | Phases:
        if phases := schedule.steps.phases:
            return tuple(
                Phase(lambda phase: map(renumber, phase.make(*phase.args)), (phase,), phase.width) for phase in phases
            )
        return map(renumber, schedule.steps)

    root = None if schedule.root is None else rank_at[schedule.root]
    scratch = schedule.contract.total - schedule.data_chunks
    same_bits, part_of = schedule.contract.same_bits, schedule.part
    part = None if part_of is None else lambda rank: map(renumber, part_of(rank_at.index(rank)))
    own = contract(schedule.collective, schedule.size, schedule.chunks, root, scratch, same_bits=same_bits)
    return replace(schedule, contract=own, steps=Steps(steps, most_steps(schedule.size)), root=root, part=part)


def _renumbering(schedule: Schedule, rank_at: NDArray[np.int64]) -> Callable[[Step], Step]:
    """A function that renumbers a step. The blocks of a schedule are ordered by its ranks, its other chunks stay.

    It also renumbers steps of phases: where there are blocks, a chunk of a phase is one chunk (``width`` is 1).
    """
    if schedule.collective not in BLOCKS:
        return lambda step: step.renumbered(rank_at)
    chunk_at = np.arange(schedule.contract.total)  # chunk_at[c]: the number of chunk c after the renumbering
    length = schedule.chunks // schedule.size  # of a block, in chunks
    side, chunk = np.divmod(chunk_at[: schedule.data_chunks], schedule.chunks)  # side 1: received, in an all_to_all
    chunk_at[: len(side)] = side * schedule.chunks + rank_at[chunk // length] * length + chunk % length
    return lambda step: Step(
        rank_at[step.src], rank_at[step.dst], chunk_at[step.chunk], step.reduce, chunk_at[step.into]
    )
