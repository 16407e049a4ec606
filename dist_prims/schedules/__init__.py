"""Schedules of collective communication as pure data: NumPy only, no torch and no I/O.

>>> from dist_prims.schedules import COLLECTIVES, algorithms
>>> COLLECTIVES[:3]
('all_reduce', 'reduce_scatter', 'all_gather')
>>> {collective: len(algorithms(collective)) for collective in COLLECTIVES if "gather" in collective}
{'all_gather': 8, 'gather': 3}
"""

from . import algorithms as _package  # noqa: F401 - first, because the function `algorithm` must not be shadowed
from .contract import COLLECTIVES
from .cost_card import Card, ceil_log2, floor_pow2
from .graph import Graph
from .registry import algorithm, algorithms, lookup, unregister
from .schedule import Schedule
from .schedule_builder import build
from .schedule_error import ScheduleError
from .steps import Step
from .synthesis import synthesize

__all__ = [
    "COLLECTIVES",
    "Card",
    "Graph",
    "Schedule",
    "ScheduleError",
    "Step",
    "algorithm",
    "algorithms",
    "build",
    "ceil_log2",
    "floor_pow2",
    "lookup",
    "synthesize",
    "unregister",
]
