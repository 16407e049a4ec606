"""The script of a round: which steps all ranks take, and how the round ends, as data drawn from the seed alone.

All ranks write the same script. What a step leaves open (delays, the order of waits) each rank draws from a generator
of its own, which also follows from the seed. Each step has generators of its own, so a step does the same whatever
stands before it: a failing script can be cut down with ``--steps``.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from .rank import Rank

__all__ = ["ENDINGS", "STEPS", "Script", "ending", "step", "write"]

Action = Callable[["Rank", Random], None]
Some = TypeVar("Some", bound=Action)

STEPS: dict[str, tuple[float, Action]] = {}
ENDINGS: dict[str, tuple[float, Action]] = {}


@dataclass(frozen=True)
class Script:
    seed: int
    round: int
    size: int
    steps: tuple[str, ...]
    ending: str

    def shared(self, number: int) -> Random:
        """The generator of a step: draws the same on all ranks."""
        return Random(f"{self.seed} {self.round} {number}")

    def private(self, number: int, rank: int) -> Random:
        return Random(f"{self.seed} {self.round} {number} of rank {rank}")


def step(name: str, weight: float = 1) -> Callable[[Some], Some]:
    return _entry(STEPS, name, weight)


def ending(name: str, weight: float = 1) -> Callable[[Some], Some]:
    return _entry(ENDINGS, name, weight)


def _entry(table: dict[str, tuple[float, Action]], name: str, weight: float) -> Callable[[Some], Some]:
    def register(action: Some) -> Some:
        table[name] = (weight, action)
        return action

    return register


def write(seed: int, round: int, length: int, without: Container[str] = ()) -> Script:
    """The script of one round: of 2 to 4 ranks, and about as many steps as asked for."""
    random = Random(f"{seed} {round}")
    size = random.choice([2, 2, 3, 3, 4])

    def drawn(table: dict[str, tuple[float, Action]], number: int) -> list[str]:
        names = [name for name in table if name not in without]
        return random.choices(names, [table[name][0] for name in names], k=number)

    return Script(seed, round, size, tuple(drawn(STEPS, length)), drawn(ENDINGS, 1)[0])
