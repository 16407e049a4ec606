"""Groups that span hosts: which schedule each collective follows, and that schedule as one of its ranks executes it.

Ranks are given *seats*, host by host, so that the schedules of a topology apply whichever rank runs where:

    rank    0  1  2  3        on hosts  a  b  a  b
    seat    0  2  1  3

The choice is the cheapest by price on the topology, by what ``python -m dist_prims.bench calibrate`` has measured where
rank 0 runs, or by plain assumptions. All ranks of a group must choose alike, so rank 0's figures are everybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..schedules import Schedule, build
from ..schedules.contract import ROOTED
from ..schedules.native import NativeForm, to_native
from ..schedules.recommend import recommend
from ..schedules.topology import Topology

__all__ = ["ASSUMED", "MultiHostSchedules", "Seats"]

# Seconds a message and a byte: shared memory, and gloo over a network of 10 Gbit/s.
ASSUMED: Mapping[str, Any] = {
    "inner": {"alpha": 3e-6, "beta": 0.2e-9},
    "outer": {"alpha": 50e-6, "beta": 1e-9},
    "gamma": 0.1e-9,
}


@dataclass(frozen=True)
class Seats:
    """Ranks in the order of their hosts: ``rank_at[seat]``, and the number of ranks of each host.

    >>> Seats.of(["a", "b", "a", "b"])
    Seats(rank_at=(0, 2, 1, 3), hosts=(2, 2))
    """

    rank_at: tuple[int, ...]
    hosts: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> Seats:
        order = list(dict.fromkeys(names))
        rank_at = sorted(range(len(names)), key=lambda rank: (order.index(names[rank]), rank))
        return cls(tuple(rank_at), tuple(names.count(name) for name in order))


class MultiHostSchedules:
    """The schedules of one group, for one of its ranks. ``choose`` is what the backend asks."""

    def __init__(
        self, names: Sequence[str], rank: int, measured: Mapping[str, Any], check: Callable[[Schedule], None]
    ) -> None:
        """``check`` raises for a schedule that must not run."""
        self.seats = Seats.of(names)
        self.rank = rank
        self._check = check
        self.topology = Topology.measured(self.seats.hosts, measured)

    def choose(self, collective: str, nbytes: int, root: int) -> NativeForm:
        """The cheapest schedule for sizes of the octave that ``nbytes`` lies in."""
        low = 0 if nbytes < 2 else 1 << (nbytes.bit_length() - 1)
        best = recommend(collective, max(low * 1.5, 1), self.topology).candidates[0]
        parameters = dict(best.schedule.parameters)
        if collective in ROOTED:
            parameters["root"] = self.seats.rank_at.index(root)
        schedule = build(collective, best.schedule.algorithm, self.topology.size, **parameters)
        self._check(schedule)
        return to_native(schedule, self.rank, low, max(2 * low, 2), _short(schedule), best.segments, self.seats.rank_at)


def _short(schedule: Schedule) -> str:
    """A name for the agreement, which has room for 47 letters."""
    values = [str(value) for key, value in schedule.parameters if key != "hosts"]
    return f"{schedule.algorithm}({', '.join(values)})" if values else schedule.algorithm
