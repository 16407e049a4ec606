"""Groups on several hosts: the choice of a schedule for each collective, and one rank's part of it for C++.

The choice is the schedule that ``schedules/recommend.py`` recommends for the topology (hosts, links, cores): it takes
the least time or nearly so, at the costs of ``link_costs.py``. Schedules number the ranks host by host, while a group
may number them in any order: ``HostOrder`` translates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..schedules import Schedule
from ..schedules.contract import ROOTED
from ..schedules.host_order import HostOrder
from ..schedules.piggyback import MOST_HOSTS, added_seconds
from ..schedules.program import RankSchedule
from ..schedules.recommend import MUCH_SHORTER, PERSONALIZED, recommend
from ..schedules.registry import version
from ..schedules.topology import Topology
from ..schedules.trust import evaluated

__all__: list[str] = []


class _Choice(NamedTuple):
    """An algorithm, with its parameters and the number of segments of a message."""

    algorithm: str
    parameters: tuple[tuple[str, Any], ...] = ()
    segments: int = 1


_DIRECT = _Choice("direct")  # sends all blocks at once
_PAIRWISE = _Choice("pairwise")  # sends one block at a time, so that each rank has one sender at a time

# For all_to_all: if _MOST_STREAMS or more messages of _LARGE bytes are on the link of a host at the same time, it drops
# packets, and TCP waits 200 ms before it sends them again. From _VERY_LARGE on, TCP detects a dropped packet earlier,
# by the packets that follow it, so _MOST_STREAMS messages are no problem there, but more are.
_MOST_STREAMS, _LARGE, _VERY_LARGE = 4, 1 << 19, 1 << 22
_UNEVEN_RANGES = ((0, _LARGE), (_LARGE, _VERY_LARGE), (_VERY_LARGE, 1 << 63))  # of bytes, with one schedule each


class MultiHostSchedules:
    """The schedules of one group, for one of its ranks.

    C++ calls ``choose`` in the first call of a collective with a size outside of the ranges that it has asked for.
    """

    def __init__(
        self, names: Sequence[str], rank: int, costs: Mapping[str, Any], check: Callable[[Schedule], None]
    ) -> None:
        """Args:
        names: the host of each rank.
        rank: this rank.
        costs: of messages and bytes, see ``link_costs.py``.
        check: raises for an incorrect schedule.
        """
        self.order = HostOrder.of(names)
        self.rank = rank
        self._check = check
        self.use(costs)
        version()  # loads the algorithms, so that the first call need not

    def use(self, costs: Mapping[str, Any]) -> None:
        """Choose by these costs from now on. All ranks of the group must call this between the same two collectives."""
        self.costs = costs
        self.topology = Topology.measured(self.order.hosts, costs)

    def choose(self, collective: str, nbytes: int, root: int, is_even: bool = True) -> RankSchedule:
        """Return this rank's part of the recommended schedule; it states for which range of sizes it is valid.

        Args:
            collective: the name of the collective.
            nbytes: the size of the data. The range is from the power of two below it to the power of two above it.
            root: the root as a rank of the group; without meaning if the collective has none.
            is_even: False: the blocks differ in length, and no rank knows the lengths of blocks between two others. The
                schedule then sends each block straight to its receiver. ``nbytes`` counts this rank's bytes alone, so
                ranks may follow different schedules, which send the same messages.
        """
        # 1. The algorithm, for sizes from ``low`` to ``high``.
        low = 0 if nbytes < 2 else 1 << (nbytes.bit_length() - 1)
        high = max(2 * low, 2)
        if is_even:
            choice, is_slower = _recommended(collective, low, self.topology, version())
        else:
            is_slower = False
            low, high = next(sizes for sizes in _UNEVEN_RANGES if nbytes < sizes[1])
            choice = _to_receivers(collective, self.topology, low)
        # 2. Its schedule. An algorithm that a user has registered may be right for root 0, and wrong for this root.
        schedule = self._compile(collective, choice, low, high, root)
        if schedule is None:
            choice, _ = _recommended(collective, low, self.topology, version(), only_built_in=True)
            schedule = self._compile(collective, choice, low, high, root)
        assert schedule is not None
        return replace(schedule, is_slower_than_piggyback=is_slower)

    def _compile(self, collective: str, choice: _Choice, low: int, high: int, root: int) -> RankSchedule | None:
        """Return this rank's part of the schedule for a root; None if a user has registered it and it is wrong."""
        root_parameter = {"root": self.order.rank_at.index(root)} if collective in ROOTED else {}

        def compile_for_rank(build: Callable[[], Schedule]) -> RankSchedule:
            self._check(schedule := build())
            renumbered = self.order.renumbered(schedule)
            return RankSchedule.of(renumbered, self.rank, _short_name(schedule), choice.segments, low, high)

        parameters = {**dict(choice.parameters), **root_parameter}
        return evaluated(compile_for_rank, collective, choice.algorithm, self.topology.size, **parameters)


@functools.lru_cache(maxsize=1024)
def _recommended(
    collective: str, low: int, topology: Topology, _version: int, only_built_in: bool = False
) -> tuple[_Choice, bool]:
    """The choice for sizes from ``low``, a power of two, to 2 * ``low``, and whether it is slower than the piggyback.

    The piggyback sends the data with the agreement on the call. The choice does not depend on the root. All groups of
    the process with the same hosts and cost figures share it, until an algorithm is registered: ``_version`` counts.
    """
    nbytes = max(low * 1.5, 1)
    candidates = recommend(collective, nbytes, topology, only_best=True, only_built_in=only_built_in).candidates
    best = candidates[0]
    choice = _Choice(best.algorithm, best.parameters, best.segments)
    if collective in PERSONALIZED:  # direct messages, unless another schedule is much faster
        direct = next((candidate for candidate in candidates if candidate.name == "direct"), best)
        if best.seconds >= MUCH_SHORTER * direct.seconds:
            choice, best = _to_receivers(collective, topology, low), direct
    may_carry = len(topology.hosts) <= MOST_HOSTS  # between more hosts C++ chooses the piggyback by the size alone
    return choice, may_carry and best.seconds > added_seconds(collective, nbytes, topology)


def _to_receivers(collective: str, topology: Topology, nbytes: int) -> _Choice:
    """The schedule that sends each block straight to its receiver: all at once, unless that is too much for a link."""
    streams = max(ranks * (topology.size - ranks) for ranks in topology.hosts)  # messages on one link at once
    is_crowded = nbytes >= _LARGE and streams >= _MOST_STREAMS + (nbytes >= _VERY_LARGE)
    return _PAIRWISE if collective == "all_to_all" and is_crowded else _DIRECT


def _short_name(schedule: Schedule) -> str:
    """Return a name for the description of a call that C++ compares, which has room for 47 characters."""
    values = [str(value) for key, value in schedule.parameters if key != "hosts"]
    return f"{schedule.algorithm}({', '.join(values)})" if values else schedule.algorithm
