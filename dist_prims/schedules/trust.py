"""Trust: the rules that decide which schedules may run without a proof.

The tests of this package verify the algorithms that it registers. An algorithm that a user registers may be wrong, and
a wrong one still runs: it leaves wrong numbers on some ranks and raises nothing. So its schedule is proved before its
first run for a number of ranks, whether it is chosen by name, by size, by price or pinned. A proof takes less than a
second up to 256 ranks; above :data:`MOST_RANKS` only ``algorithm(..., trust=True)`` runs without a proof.
"""

from __future__ import annotations

import functools
import hashlib

from .contract import COLLECTIVES
from .registry import Algorithm, algorithms, lookup
from .schedule import Schedule

__all__: list[str] = []

MOST_RANKS = 512


def is_trusted(schedule: Schedule) -> bool:
    """Whether the algorithm, and every algorithm named by one of its parameters, is built in or marked as trusted."""
    parts = {value for _, value in schedule.parameters if isinstance(value, str)}
    named = [lookup(schedule.collective, schedule.algorithm)]
    named += [lookup(kind, name) for kind in COLLECTIVES for name in algorithms(kind) if name in parts]
    return all(each.trusted for each in named)


def may_be_chosen(registered: Algorithm, size: int) -> bool:
    """Whether the algorithm may be chosen automatically: its ranks end with the same bits, and it can be proved."""
    return registered.replicas == "same" and (registered.trusted or size <= MOST_RANKS)


@functools.lru_cache(maxsize=256)
def fingerprint(schedule: Schedule) -> str:
    """A hash of the steps and their initial state; equal schedules have equal hashes."""
    of = hashlib.sha256(repr((schedule.collective, schedule.size, schedule.chunks, schedule.root)).encode())
    of.update(str(schedule.contract.total).encode())
    for step in schedule.steps:
        for column in (step.src, step.dst, step.chunk, step.into, step.reduce):
            of.update(len(column).to_bytes(8, "little") + column.tobytes())
    return of.hexdigest()
