"""Pinned schedules: schedules that the options of a group, or the environment, name for ranges of sizes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from ..collectives.algorithm_choice import AlgorithmRange, parse_ranges, variable_of
from ..collectives.backend_calls import schedule_name
from ..schedules import Schedule, lookup
from ..schedules.contract import ROOTED
from ..schedules.host_order import HostOrder
from ..schedules.program import RankSchedule
from ..schedules.schedule_builder import build_shared
from ..schedules.trust import shortened
from .multi_host import MultiHostSchedules
from .options import PINNABLE, BackendOptions

__all__: list[str] = []


def pin_schedules(
    backend: Any,
    rank: int,
    size: int,
    options: BackendOptions,
    multi_host: MultiHostSchedules | None,
    check: Callable[[Schedule], None],
) -> None:
    """Pin the schedules of every collective in a new group.

    A schedule with a root is for one root. The schedules of root 0 are made now, so that an algorithm that is wrong, or
    not for this number of ranks, raises an error here. C++ makes the schedules of another root in the first call with
    that root.

    Args:
        backend: of the group.
        rank, size: this rank, and the number of ranks.
        options: of the group.
        multi_host: the schedules of a group that spans hosts, which know the hosts of the ranks; else None.
        check: raises for an incorrect schedule. All ranks call it for the same schedules in the same order.
    """
    for collective in PINNABLE:
        variable = variable_of(collective)
        text = options.algorithms.get(collective) or os.environ.get(variable, "")
        if ranges := parse_ranges(text, collective, variable):
            make_for_root = functools.partial(_make_pinned, collective, ranges, rank, size, multi_host, check)
            make_for_root(0)
            backend.pin(collective, shortened(text), make_for_root)


def _make_pinned(
    collective: str,
    ranges: Sequence[AlgorithmRange],
    rank: int,
    size: int,
    multi_host: MultiHostSchedules | None,
    check: Callable[[Schedule], None],
    root: int,
) -> list[RankSchedule]:
    """Return the schedules for a root of the group; see :func:`pin_schedules`. ``ranges``: the parsed setting.

    The ``root`` has no meaning for a collective without one.
    """
    order = multi_host.order if multi_host else HostOrder(tuple(range(size)), (size,))
    root_parameter: dict[str, Any] = {"root": order.rank_at.index(root)} if collective in ROOTED else {}
    pinned = []
    for algorithm, own_parameters, segments, low, high in ranges:
        parameters = {**root_parameter, **dict(own_parameters)}
        if multi_host and "hosts" in lookup(collective, algorithm).parameters:
            parameters.setdefault("hosts", multi_host.topology.hosts)
        try:
            schedule = build_shared(collective, algorithm, size, **parameters)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{collective} cannot be pinned to {algorithm!r}: {error}") from error
        check(schedule)
        renumbered, name = order.renumbered(schedule), schedule_name(schedule)
        pinned.append(RankSchedule.of(renumbered, rank, name, segments, low, high))
    return pinned
