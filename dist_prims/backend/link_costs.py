"""The costs of messages by which the ranks of a group choose schedules: calibrated, measured, or assumed.

Costs that ``python -m dist_prims.bench calibrate`` has measured on the machine of rank 0 come first. Without them C++
measures the link between the first two hosts when the group is made, in some 25 ms at 1 Gbit/s. All ranks use the same
figures, because all must choose the same schedule.

A cost has two figures: *alpha*, the seconds for a message, and *beta*, the seconds for a byte. *inner* is the link
within a host, *outer* the link between hosts, and *gamma* the seconds to reduce a byte.

A schedule determines the order of additions, and with it the last bits of a sum. A measurement varies from run to run,
so it is rounded to one of a few steps, which are far apart: the usual rates of networks lie near the middle of a step,
and everything faster than 5 Gbit/s counts as 10 Gbit/s, since there the processors limit the speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..rendezvous.hosts import on_one_machine
from ..schedules.cost import FAST_LINK
from .tuning import CALIBRATION

__all__: list[str] = []

Costs = Mapping[str, Any]  # as in the file of `bench calibrate`

# Shared memory, and TCP over a network of 10 Gbit/s.
ASSUMED: Costs = {
    "inner": {"alpha": 3e-6, "beta": 0.2e-9},
    "outer": {"alpha": 50e-6, "beta": 1e-9},
    "gamma": 0.1e-9,
}

# The steps of a measured figure: the largest value that belongs to a step, and the value that replaces it.
_ALPHAS = ((4e-6, 2e-6), (158e-6, 50e-6), (1.58e-3, 500e-6), (15.8e-3, 5e-3), (float("inf"), 50e-3))
_BETAS = ((FAST_LINK, 1e-9), (4.8e-9, 2.7e-9), (15e-9, 8.5e-9), (48e-9, 27e-9), (150e-9, 85e-9), (float("inf"), 850e-9))

_measured: dict[frozenset[str], Mapping[str, float]] = {}  # alpha and beta of the link, by the two hosts


def uncalibrated(hosts: Sequence[str], outer: Mapping[str, float] = ASSUMED["outer"]) -> Costs:
    """Return the costs without a calibration: the assumed ones, with the link ``outer`` if it has been measured.

    >>> uncalibrated(["a", "b"])["one_machine"]
    False
    """
    return {**ASSUMED, "outer": outer, "one_machine": on_one_machine(hosts)}


def known(hosts: Sequence[str], warn: bool) -> Costs:
    """Return the costs that this rank, rank 0, knows; empty if it knows none, and the link is to be measured.

    ``hosts``: the host of each rank. ``warn``: print a message about a calibration that is ignored.
    """
    outer = _measured.get(_first_two(hosts))
    return CALIBRATION.read(warn) or (uncalibrated(hosts, outer) if outer else {})


def measured(hosts: Sequence[str], alpha: float, beta: float) -> Costs:
    """Return the costs for a link with these figures, and keep them for other groups with the same first two hosts.

    >>> measured(["a", "b"], alpha=31e-6, beta=8.9e-9)["outer"]  # 1 Gbit/s
    {'alpha': 5e-05, 'beta': 8.5e-09}
    """
    outer = {"alpha": _step(_ALPHAS, alpha), "beta": _step(_BETAS, beta)}
    return uncalibrated(hosts, _measured.setdefault(_first_two(hosts), outer))


def _first_two(hosts: Sequence[str]) -> frozenset[str]:
    return frozenset(list(dict.fromkeys(hosts))[:2])


def _step(steps: Sequence[tuple[float, float]], figure: float) -> float:
    return next(replacement for largest, replacement in steps if figure <= largest)
