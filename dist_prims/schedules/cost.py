"""The price of a schedule in the alpha-beta-gamma model: one port a rank, sending and receiving at once.

A step lasts as long as its busiest rank: ``alpha`` for each message (transfers between one pair of ranks are one),
``beta`` for each byte sent or received, ``gamma`` for each byte reduced. The price is one pass over the steps and
holds one step at a time, so a ring of 12,500 hosts has its price in seconds without being stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from .card import ceil_log2
from .schedule import Schedule, Step

__all__ = ["Cost", "busiest_sender", "lower_bound", "price"]


@dataclass(frozen=True)
class Cost:
    """Messages, and fractions of the data moved and reduced, on the critical path."""

    messages: int
    moved: Fraction
    reduced: Fraction

    def seconds(self, nbytes: float, alpha: float, beta: float, gamma: float = 0.0) -> float:
        return self.messages * alpha + nbytes * (float(self.moved) * beta + float(self.reduced) * gamma)


def price(schedule: Schedule) -> Cost:
    """What the busiest rank of each step counts, added over the steps."""
    messages = moved = reduced = 0
    for step in schedule.steps:
        far = step.take(step.src != step.dst)
        messages += _busiest_messages(far, schedule.size)
        moved += max(_most(far.src), _most(far.dst))
        reduced += _most(step.dst[step.reduce])
    return Cost(messages, moved * schedule.share, reduced * schedule.share)


def busiest_sender(schedule: Schedule) -> Fraction:
    """Bytes that the rank which sends most sends, as a fraction of the data."""
    rows = np.zeros(schedule.size, np.int64)
    for step in schedule.steps:
        rows += np.bincount(step.src[step.src != step.dst], minlength=schedule.size)
    return int(rows.max()) * schedule.share


def _most(ranks: NDArray[np.int64]) -> int:
    return int(np.bincount(ranks).max()) if len(ranks) else 0


def _busiest_messages(step: Step, size: int) -> int:
    pairs = np.unique(step.src * size + step.dst)
    return max(_most(pairs // size), _most(pairs % size))


def lower_bound(collective: str, size: int) -> Cost:
    """Below this no algorithm can come: information must reach every rank, and every byte must pass its port.

    Messages: the number of ranks that know can at most double a step. Bytes: Chan et al. 2007 for the
    collectives of one buffer; for gather, scatter and all_to_all what must cross one port.
    """
    rest = Fraction(size - 1, size)
    one = Fraction(min(size - 1, 1))
    moved, reduced = {
        "all_reduce": (2 * rest, rest),
        "reduce_scatter": (rest, rest),
        "all_gather": (rest, Fraction(0)),
        "broadcast": (one, Fraction(0)),
        "reduce": (one, rest),
        "gather": (rest, Fraction(0)),
        "scatter": (rest, Fraction(0)),
        "all_to_all": (rest, Fraction(0)),
        "barrier": (Fraction(0), Fraction(0)),
        "scan": (one, one),
        "exclusive_scan": (one, one if size > 2 else Fraction(0)),
    }[collective]
    return Cost(ceil_log2(size), moved, reduced)
