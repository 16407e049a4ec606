"""The cost model as data: its terms, the counts of every algorithm, and the lower bound.

The price of a schedule is a sum of terms, each a count times some of the parameters ``alpha``, ``beta``, ``gamma`` and
``nbytes``. A page evaluates these terms with the parameters of its sliders.
"""

from __future__ import annotations

import functools
from typing import Any

from ..cost import TERMS, Cost, cost_of, lower_bound, price
from ..load import Hosts
from ..registry import Algorithm, algorithms, load_by_card, lookup
from ..steps import ScheduleData

__all__: list[str] = []

SIZES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)


def cost_data(schedule: ScheduleData) -> dict[str, Any]:
    """Terms, and the counts of each algorithm and of the lower bound at several numbers of ranks.

    >>> from dist_prims.schedules import build
    >>> data = cost_data(build("all_reduce", "ring", size=5))
    >>> data["terms"][1], data["here"], data["bound"][data["sizes"].index(5)]
    (['bandwidth', ['nbytes', 'beta']], [8, 1.6, 0.8], [3, 1.6, 0.8])
    """
    sizes = sorted({*SIZES, schedule.size})
    names = algorithms(schedule.collective)
    return {
        "terms": [[name, list(parameters)] for name, parameters in TERMS],
        "here": _counts(price(schedule)),
        "sizes": sizes,
        "algorithms": {name: [_priced(lookup(schedule.collective, name), size) for size in sizes] for name in names},
        "bound": [_counts(lower_bound(schedule.collective, size)) for size in sizes],
    }


def _counts(cost: Cost) -> list[float]:
    return [round(float(count), 9) if count % 1 else int(count) for count in cost.counts]


@functools.lru_cache(maxsize=4096)
def _priced(registered: Algorithm, size: int) -> list[float] | None:
    """The counts of an algorithm with its default parameters; None if it has none for this number of ranks."""
    try:
        return _counts(cost_of(load_by_card(registered, Hosts((size,)))))
    except Exception:  # an algorithm of the program may raise anything for a number of ranks
        return None
