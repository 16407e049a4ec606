"""Selection of an algorithm: the one that a call or an environment variable names for a size, or the cheapest.

    all_reduce(tensor, algorithm="tree(degree=4)")
    DIST_PRIMS_ALL_REDUCE="recursive_doubling:0-16K;halving_doubling:16K-1M;ring x4:1M-max"
    DIST_PRIMS_BROADCAST="hierarchical(hosts=2,2,inner=direct)"

A range of sizes includes its start and excludes its end. A size is the size of the whole data in bytes: of all blocks,
where a collective has one block for each rank. Parameters of an algorithm are whole numbers, names, or lists of these.
``x4`` cuts the data into 4 segments, which follow each other through the steps of the schedule.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from ..schedules import Schedule, algorithms, lookup
from ..schedules.cost import Cost, cost_of
from ..schedules.load import Hosts
from ..schedules.registry import Algorithm, load_by_card, version
from ..schedules.trust import may_be_chosen, priced
from ..units import parse_bytes

__all__: list[str] = []

CHEAPEST = "cheapest"  # as the name of an algorithm

# Seconds for a message, a byte moved, a byte reduced: gloo over loopback, measured on a 2-core machine. The numbers
# serve to compare algorithms only. Where the choice matters, measure and pin an algorithm.
ALPHA, BETA, GAMMA = 60e-6, 0.5e-9, 0.1e-9

# Algorithms of all_to_all that send each block directly to its destination, and support uneven splits: both ranks know
# the length of the block, whereas a rank that forwards blocks does not know the lengths of other ranks' blocks.
UNFORWARDED = ("pairwise", "direct")


def _bytes(text: str, variable: str) -> int:
    if text == "max":
        return 1 << 63
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{variable}: {error} or max") from None


class AlgorithmRange(NamedTuple):
    """An algorithm with its parameters and number of segments, for sizes from ``low`` to ``high`` - 1 bytes."""

    algorithm: str
    parameters: tuple[tuple[str, Any], ...] = ()
    segments: int = 1
    low: int = 0
    high: int = 1 << 63


_ALGORITHM = re.compile(r"(?P<name>[^()]+?)\s*(\((?P<parameters>[^()]*)\))?(\s*\bx(?P<segments>\d+))?")
MOST_SEGMENTS = 1024


@functools.lru_cache(maxsize=64)
def parse_ranges(text: str, collective: str, variable: str) -> tuple[AlgorithmRange, ...]:
    """Parse a setting. ``variable`` names it in errors: an environment variable, an option or a call.

    >>> parse_ranges("tree(degree=4) x8:1M-max", "all_reduce", "DIST_PRIMS_ALL_REDUCE")
    (AlgorithmRange(algorithm='tree', parameters=(('degree', 4),), segments=8, low=1048576, high=9223372036854775808),)
    """
    return tuple(_range(part.strip(), collective, variable) for part in text.split(";") if part.strip())


def _range(part: str, collective: str, variable: str) -> AlgorithmRange:
    what, _, span = part.partition(":")
    low, dash, high = (span or "0-max").partition("-")
    if not dash:
        raise ValueError(f"{variable}: {span!r} is not a range; write e.g. {what}:16K-1M")
    words = _ALGORITHM.fullmatch(what.strip())
    if words is None:
        raise ValueError(f"{variable}: {what!r} is no algorithm; write e.g. ring, ring x4 or tree(degree=4) x4")
    lookup(collective, words["name"])  # raises for an unknown algorithm
    segments = int(words["segments"] or 1)
    if not 1 <= segments <= MOST_SEGMENTS:
        raise ValueError(f"{variable}: x{segments} is not between 1 and {MOST_SEGMENTS} segments")
    start, end = _bytes(low.strip(), variable), _bytes(high.strip(), variable)
    if start >= end:
        raise ValueError(f"{variable}: the range {span!r} is empty; its end must be larger than its start")
    if collective == "barrier" and start > 0:
        raise ValueError(f"{variable}: a barrier has no data, so {part!r} never applies; omit the range")
    return AlgorithmRange(words["name"], _parameters(words["parameters"] or "", variable), segments, start, end)


def _parameters(text: str, variable: str) -> tuple[tuple[str, Any], ...]:
    lists: dict[str, list[Any]] = {}
    for part in filter(str.strip, text.split(",")):
        name, equals, value = part.rpartition("=")
        if not (equals or lists):
            raise ValueError(f"{variable}: ({text}) are no parameters; write e.g. tree(degree=4)")
        values = lists.setdefault(name.strip(), []) if equals else [*lists.values()][-1]
        values.append(int(value) if value.strip().isdecimal() else value.strip())
    return tuple((name, values[0] if len(values) == 1 else tuple(values)) for name, values in lists.items())


@functools.lru_cache(maxsize=1024)
def _price(_version: int, registered: Algorithm, size: int) -> Cost | None:
    """Return the price of an algorithm; None if it raises, or a user has registered it and it is wrong.

    It may use other algorithms of the user, so it is valid until an algorithm is registered: ``_version`` counts.
    """

    def price(_: Callable[[], Schedule]) -> Cost:
        return cost_of(load_by_card(registered, Hosts((size,))))

    return priced(price, registered.collective, registered.name, size)


def named_algorithm(text: str, collective: str, variable: str, nbytes: int) -> AlgorithmRange | None:
    """Return the algorithm that the setting ``text`` names for data of ``nbytes``, or None; see parse_ranges()."""
    return next((each for each in parse_ranges(text, collective, variable) if each.low <= nbytes < each.high), None)


def configured_algorithm(collective: str, nbytes: int) -> AlgorithmRange | None:
    """Return the algorithm that the environment names for data of ``nbytes``, or None."""
    variable = variable_of(collective)
    return named_algorithm(os.environ.get(variable, ""), collective, variable, nbytes)


def variable_of(collective: str) -> str:
    """Return the environment variable that names the algorithms of a collective."""
    return f"DIST_PRIMS_{collective.upper()}"


def cheapest(collective: str, size: int, nbytes: int, even: bool = True) -> str:
    """Return the algorithm of the lowest cost for data of ``nbytes``, in blocks of the same length if ``even``."""
    candidates = [lookup(collective, name) for name in algorithms(collective) if even or name in UNFORWARDED]
    current = version()
    prices = {each.name: _price(current, each, size) for each in candidates if may_be_chosen(each, size)}
    seconds = {name: price.seconds(nbytes, ALPHA, BETA, GAMMA) for name, price in prices.items() if price}
    return min(seconds, key=seconds.__getitem__)
