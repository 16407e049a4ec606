"""Checks of answers that are programs of ranks.

Each rank has a value that the process of no other rank knows, so a right result must have come in a message.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from .answer import Answer
from .messages import run

__all__: list[str] = []


def private_values(count: int) -> list[int]:
    """Values that differ from each other and from run to run, so no answer can know the values of other ranks."""
    return random.SystemRandom().sample(range(100, 1_000_000), count)


def run_programs(answer: Answer, values: Sequence[int]) -> list[Any]:
    """Run the learner's ``program(rank, size, value)`` on one rank for each value; what the ranks return."""
    size = len(values)
    return run(lambda rank, _: answer.program("program", rank, rank, size, values[rank]), size)
