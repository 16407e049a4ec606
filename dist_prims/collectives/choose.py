"""Which algorithm: the one asked for, the one that the environment names for this size, or the cheapest.

    DIST_PRIMS_ALL_REDUCE=ring
    DIST_PRIMS_ALL_REDUCE="recursive_doubling:0-16K;halving_doubling:16K-1M;ring:1M-max"

A range holds sizes from its start up to, not including, its end; sizes that no range holds get the cheapest.
"""

from __future__ import annotations

import functools
import os
import re

from ..schedules import algorithms, build, lookup
from ..schedules.cost import Cost

__all__ = ["ALPHA", "BETA", "GAMMA", "STRAIGHT", "choose", "parse_ranges"]

# Seconds a message, a byte moved, a byte reduced: gloo over loopback, seen on one 2-core machine. They only order
# algorithms; where the order matters, measure and pin.
ALPHA, BETA, GAMMA = 60e-6, 0.5e-9, 0.1e-9

# all_to_all with uneven splits: only a block that goes straight to its rank has a length that both sides know.
STRAIGHT = ("pairwise", "direct")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _bytes(text: str, variable: str) -> int:
    if text == "max":
        return 1 << 63
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text.upper())
    if match is None:
        raise ValueError(f"{variable}: {text!r} is not a size; write 512, 16K, 1M, 2G or max")
    return int(match[1]) * _UNITS[match[2]]


@functools.lru_cache(maxsize=64)
def parse_ranges(text: str, collective: str, variable: str) -> tuple[tuple[str, int, int], ...]:
    """(algorithm, from, up to) for each range of a setting.

    >>> parse_ranges("ring:1M-max", "all_reduce", "DIST_PRIMS_ALL_REDUCE")
    (('ring', 1048576, 9223372036854775808),)
    """
    ranges = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, _, span = part.partition(":")
        low, dash, high = (span or "0-max").partition("-")
        if not dash:
            raise ValueError(f"{variable}: {span!r} is not a range; write e.g. {name}:16K-1M")
        lookup(collective, name.strip())
        ranges.append((name.strip(), _bytes(low.strip(), variable), _bytes(high.strip(), variable)))
    return tuple(ranges)


@functools.lru_cache(maxsize=1024)
def _prices(collective: str, size: int) -> tuple[tuple[str, Cost], ...]:
    named = ((name, lookup(collective, name)) for name in algorithms(collective))
    return tuple((name, build(collective, name, size).price) for name, found in named if found.replicas == "same")


def choose(collective: str, size: int, nbytes: int, even: bool = True) -> str:
    """The name of the algorithm for data of ``nbytes`` where the caller names none."""
    variable = f"DIST_PRIMS_{collective.upper()}"
    for name, low, high in parse_ranges(os.environ.get(variable, ""), collective, variable):
        if low <= nbytes < high:
            return name
    prices = [(name, price) for name, price in _prices(collective, size) if even or name in STRAIGHT]
    return min(prices, key=lambda each: each[1].seconds(nbytes, ALPHA, BETA, GAMMA))[0]
