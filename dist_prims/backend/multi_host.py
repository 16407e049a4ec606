"""Groups on several hosts: the choice of a schedule for each collective, and the program of one rank.

The schedules of a topology number the ranks host by host; see ``schedules/host_order.py``.

The choice is the schedule that is recommended for the topology: the lowest cost or nearly so, at the costs of
``link_costs.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..schedules import Schedule
from ..schedules.contract import ROOTED
from ..schedules.host_order import HostOrder
from ..schedules.piggyback import added_seconds
from ..schedules.program import RankSchedule
from ..schedules.recommend import EXCHANGES, MUCH_SHORTER, recommend
from ..schedules.registry import version
from ..schedules.topology import Topology
from ..schedules.trust import evaluated

__all__: list[str] = []

_Choice = tuple[str, tuple[tuple[str, Any], ...], int]  # an algorithm, its parameters, and the number of segments
_DIRECT: _Choice = ("direct", (), 1)
_PAIRWISE: _Choice = ("pairwise", (), 1)

# For all_to_all: if more ranks of other hosts send large blocks to a host at the same time, the link drops packets, and
# TCP waits 200 ms before it sends them again. In a pairwise exchange each rank has one sender at a time. From
# _VERY_LARGE on, TCP notices a dropped packet earlier, by the packets that follow it, and more streams are no problem.
_MOST_STREAMS, _LARGE, _VERY_LARGE = 4, 1 << 19, 1 << 22
_UNEVEN_RANGES = ((0, _LARGE), (_LARGE, _VERY_LARGE), (_VERY_LARGE, 1 << 63))


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
        version()  # loads the algorithms, so that the first call need not

    def use(self, costs: Mapping[str, Any]) -> None:
        """Choose by these costs from now on. All ranks of the group must do so between the same two calls."""
        self.costs = costs
        self.topology = Topology.measured(self.order.hosts, costs)

    def choose(self, collective: str, nbytes: int, root: int, is_even: bool = True) -> RankSchedule:
        """Return the schedule that is recommended for sizes between the powers of two around ``nbytes``.

        If not ``is_even``, the blocks differ in length, and no rank knows the lengths of blocks between two others: the
        schedule then sends each block straight to its receiver. ``nbytes`` counts this rank's bytes alone, so ranks may
        follow different schedules, which send the same messages.
        """
        low = _octave(nbytes)
        high = max(2 * low, 2)
        if is_even:
            choice, is_slower = _recommended(collective, low, self.topology, version())
        else:
            is_slower = False
            low, high = next(each for each in _UNEVEN_RANGES if nbytes < each[1])
            choice = _straight(collective, self.topology, low)
        found = self._compiled(collective, choice, low, high, root)
        if found is None:  # an algorithm that a user has registered is right for root 0, and wrong for this root
            choice = _recommended(collective, low, self.topology, version(), only_built_in=True)[0]
            found = self._compiled(collective, choice, low, high, root)
        assert found is not None
        return replace(found, is_slower_than_piggyback=is_slower)

    def _compiled(self, collective: str, choice: _Choice, low: int, high: int, root: int) -> RankSchedule | None:
        """Return a choice for a root; None if a user has registered its algorithm and it is wrong."""
        algorithm, parameters, segments = choice
        given = {"root": self.order.rank_at.index(root)} if collective in ROOTED else {}

        def compiled(schedule: Schedule) -> RankSchedule:
            self._check(schedule)
            return RankSchedule.of(self.order.renumbered(schedule), self.rank, _short(schedule), segments, low, high)

        return evaluated(compiled, collective, algorithm, self.topology.size, **dict(parameters), **given)


def _octave(nbytes: int) -> int:
    """The largest power of two up to ``nbytes``; 0 for less than two bytes."""
    return 0 if nbytes < 2 else 1 << (nbytes.bit_length() - 1)


@functools.lru_cache(maxsize=1024)
def _recommended(
    collective: str, low: int, topology: Topology, _version: int, only_built_in: bool = False
) -> tuple[_Choice, bool]:
    """The algorithm, its parameters and the number of segments for sizes from ``low``, a power of two, to 2 * ``low``.

    The second result is whether the schedule takes longer than the data adds to the agreement. The choice does not
    depend on the root. All groups of the process with the same hosts and cost figures share it.
    """
    nbytes = max(low * 1.5, 1)
    found = recommend(collective, nbytes, topology, only_built_in=only_built_in).candidates
    best = found[0]
    choice: _Choice = (best.schedule.algorithm, best.schedule.parameters, best.segments)
    if collective in EXCHANGES:
        direct = next((each for each in found if each.name == "direct"), best)
        if best.seconds >= MUCH_SHORTER * direct.seconds:
            choice, best = _straight(collective, topology, low), direct
    return choice, best.seconds > added_seconds(collective, nbytes, topology)


def _straight(collective: str, topology: Topology, nbytes: int) -> _Choice:
    """The schedule that sends each block straight to its receiver: all at once, or one after the other."""
    return _PAIRWISE if collective == "all_to_all" and _is_crowded(topology, nbytes) else _DIRECT


def _is_crowded(topology: Topology, nbytes: int) -> bool:
    """Whether too many messages of a direct exchange would be on one link at once."""
    streams = max(ranks * (topology.size - ranks) for ranks in topology.hosts)
    return streams >= _MOST_STREAMS if _LARGE <= nbytes < _VERY_LARGE else streams > _MOST_STREAMS and nbytes >= _LARGE


def _short(schedule: Schedule) -> str:
    """Return a name for the call header, which is limited to 47 characters."""
    values = [str(value) for key, value in schedule.parameters if key != "hosts"]
    return f"{schedule.algorithm}({', '.join(values)})" if values else schedule.algorithm
