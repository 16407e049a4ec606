"""Ranks in the order of their hosts, and schedules in which the ranks of a host need not be consecutive.

The schedules of a topology number the ranks host by host. Each rank therefore has a *position* in the order of hosts:

    rank      0  1  2  3        on hosts  a  b  a  b
    position  0  2  1  3
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .contract import ROOTED, contract
from .native import places
from .schedule import Schedule
from .schedule_builder import build_shared
from .steps import Step, Steps, most_steps

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
        schedule = build_shared(collective, algorithm, len(self.rank_at), hosts=self.hosts, **parameters)
        return _renumbered(schedule, self.rank_at)


@functools.lru_cache(maxsize=256)
def _renumbered(schedule: Schedule, rank_at: tuple[int, ...]) -> Schedule:
    """The schedule with rank ``rank_at[r]`` in place of each rank r; its blocks follow the ranks."""
    if rank_at == tuple(range(schedule.size)):
        return schedule
    ranks, place = np.asarray(rank_at), places(schedule, rank_at)

    def steps() -> Iterator[Step]:
        for step in schedule.steps:
            yield Step(ranks[step.src], ranks[step.dst], place[step.chunk], step.reduce, place[step.into])

    root = None if schedule.root is None else rank_at[schedule.root]
    bare = contract(schedule.collective, schedule.size, schedule.chunks, root)
    scratch = schedule.contract.total - bare.total
    same_bits = schedule.contract.same_bits
    own = contract(schedule.collective, schedule.size, schedule.chunks, root, scratch, same_bits=same_bits)
    return replace(schedule, contract=own, steps=Steps(steps, most_steps(schedule.size)), root=root, part=None)
