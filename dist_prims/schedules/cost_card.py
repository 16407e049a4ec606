"""The cost card of an algorithm: number of steps, bytes sent, when it wins, and its source.

The documentation prints the formulas, and a test evaluates them against the schedules, so they agree. In a formula
``n`` is the size, ``L`` the rounded-up log2 of n, ``p`` the largest power of two up to n, ``l`` its log2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

__all__: list[str] = []


def ceil_log2(n: int) -> int:
    """The logarithm of n to base 2, rounded up.

    >>> [ceil_log2(n) for n in (1, 2, 3, 4, 5)]
    [0, 1, 2, 2, 3]
    """
    return (n - 1).bit_length()


def floor_pow2(n: int) -> int:
    """The largest power of two up to n.

    >>> [floor_pow2(n) for n in (1, 2, 3, 4, 7, 8)]
    [1, 2, 2, 4, 4, 8]
    """
    return 1 << (n.bit_length() - 1)


def default_ranks_a_host(n: int) -> int:
    """The ranks of a host where a hierarchical algorithm is not given hosts: the largest divisor of n up to its root.

    >>> [default_ranks_a_host(n) for n in (1, 7, 12, 16)]
    [1, 1, 3, 4]
    """
    return max(m for m in range(1, math.isqrt(n) + 1) if n % m == 0)


@dataclass(frozen=True)
class Card:
    """A cost card. ``steps``: number of steps; ``sent``: bytes sent by the busiest rank, as a fraction of the data.

    ``where``: further names in the formulas, each with a function of the size. ``load(hosts, **parameters)``: the load
    on hosts in closed form, as the items of ``closed_form_load.load_of``.

    >>> ring = Card(steps="2*(n-1)", sent="2*(n-1)/n", wins="large data", source="Patarasu and Yuan 2009")
    >>> ring.evaluate("steps", 4), ring.evaluate("sent", 4)
    (Fraction(6, 1), Fraction(3, 2))
    """

    steps: str
    sent: str
    wins: str
    source: str
    where: Mapping[str, Callable[[int], int]] = field(default_factory=dict)
    load: Callable[..., Iterable[Any]] | None = None

    def evaluate(self, formula: str, size: int) -> Fraction:
        """The exact value of ``formula``, "steps" or "sent", for a size."""
        p = floor_pow2(size)
        names = {"n": size, "L": ceil_log2(size), "p": p, "l": ceil_log2(p)}
        names |= {name: function(size) for name, function in self.where.items()}
        values = {name: Fraction(value) for name, value in names.items()}
        return Fraction(eval(getattr(self, formula), {"__builtins__": {}, "min": min, "max": max}, values))
