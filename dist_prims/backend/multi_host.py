"""Groups on several hosts: the choice of a schedule for each collective, and its form for execution by one rank.

The schedules of a topology number the ranks host by host. Each rank therefore has a *position* in the order of hosts:

    rank      0  1  2  3        on hosts  a  b  a  b
    position  0  2  1  3

The choice is the schedule that is recommended for the topology: the lowest cost or nearly so, at the costs of
``link_costs.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..schedules import Schedule
from ..schedules.contract import ROOTED
from ..schedules.native import NativeForm, to_native
from ..schedules.recommend import recommend
from ..schedules.registry import build_shared, version
from ..schedules.topology import Topology

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
    def of(cls, names: Sequence[str]) -> HostOrder:
        hosts = list(dict.fromkeys(names))
        rank_at = sorted(range(len(names)), key=lambda rank: (hosts.index(names[rank]), rank))
        return cls(tuple(rank_at), tuple(names.count(name) for name in hosts))


class MultiHostSchedules:
    """The schedules of one group, for one of its ranks. The backend calls ``choose``."""

    def __init__(
        self, names: Sequence[str], rank: int, costs: Mapping[str, Any], check: Callable[[Schedule], None]
    ) -> None:
        """``names`` are the hosts by rank. ``check`` raises for an incorrect schedule."""
        self.order = HostOrder.of(names)
        self.rank = rank
        self._check = check
        self.use(costs)

    def use(self, costs: Mapping[str, Any]) -> None:
        """Choose by these costs from now on. All ranks of the group must do so between the same two calls."""
        self.costs = costs
        self.topology = Topology.measured(self.order.hosts, costs)

    def choose(self, collective: str, nbytes: int, root: int) -> NativeForm:
        """Return the schedule that is recommended for sizes between the powers of two around ``nbytes``."""
        low = 0 if nbytes < 2 else 1 << (nbytes.bit_length() - 1)
        algorithm, parameters, segments = _recommended(collective, low, self.topology, version())
        given = {"root": self.order.rank_at.index(root)} if collective in ROOTED else {}
        schedule = build_shared(collective, algorithm, self.topology.size, **dict(parameters), **given)
        self._check(schedule)
        return to_native(schedule, self.rank, low, max(2 * low, 2), _short(schedule), segments, self.order.rank_at)


@functools.lru_cache(maxsize=1024)
def _recommended(
    collective: str, low: int, topology: Topology, _version: int
) -> tuple[str, tuple[tuple[str, Any], ...], int]:
    """The algorithm, its parameters and the number of segments for sizes from ``low``, a power of two, to 2 * ``low``.

    The choice does not depend on the root. All groups of the process with the same hosts and cost figures share it.
    """
    best = recommend(collective, max(low * 1.5, 1), topology).candidates[0]
    return best.schedule.algorithm, best.schedule.parameters, best.segments


def _short(schedule: Schedule) -> str:
    """Return a name for the call header, which is limited to 47 characters."""
    values = [str(value) for key, value in schedule.parameters if key != "hosts"]
    return f"{schedule.algorithm}({', '.join(values)})" if values else schedule.algorithm
