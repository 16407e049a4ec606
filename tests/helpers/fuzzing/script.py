"""The script of a round: which steps all ranks take, and how the round ends, as data drawn from the seed alone.

All ranks write the same script. What a step leaves open (delays, the order of waits) each rank draws from a generator
of its own, which also follows from the seed. Each step has generators of its own, so a step does the same whatever
stands before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .rank import Group, Rank

__all__ = ["ENDINGS", "STEPS", "Script", "ending", "in_own_group", "step", "write"]

Action = Callable[["Rank", Random], None]

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


def step(weight: float = 1) -> Callable[[Action], Action]:
    return _entry(STEPS, weight)


def ending(weight: float = 1) -> Callable[[Action], Action]:
    return _entry(ENDINGS, weight)


def _entry(table: dict[str, tuple[float, Action]], weight: float) -> Callable[[Action], Action]:
    def register(action: Action) -> Action:
        table[action.__name__] = weight, action
        return action

    return register


def in_own_group(weight: float = 1) -> Callable[[Callable[[Rank, Group, Random], None]], None]:
    """A step of a new group, which need not go on after it. Only members of the group take the step."""

    def register(action: Callable[[Rank, Group, Random], None]) -> None:
        def run(rank: Rank, shared: Random) -> None:
            group = rank.make_own_group(shared)
            if group.handle is not None:
                action(rank, group, shared)
                rank.destroy(group)

        STEPS[action.__name__] = weight, run

    return register


def write(seed: int, round: int, length: int, names: Collection[str]) -> Script:
    """The script of one round: of 2 to 4 ranks, and about as many steps as asked for."""
    random = Random(f"{seed} {round}")
    size = random.choice([2, 2, 3, 3, 4])

    def drawn(table: dict[str, tuple[float, Action]], number: int) -> list[str]:
        known = [name for name in table if name in names]
        return random.choices(known, [table[name][0] for name in known], k=number)

    return Script(seed, round, size, tuple(drawn(STEPS, length)), drawn(ENDINGS, 1)[0])
