"""A pipeline plan: for each rank the ordered list of the stages and micro-batches that it computes.

A model is cut into stages, a batch into micro-batches. The utilization of the ranks depends only on the order in which
each rank does its work. Written as code that computes and sends, an order can only be run. Written as a list, it can be
proved free of deadlock, priced, drawn, and run by any executor. 2 ranks, 3 micro-batches, forwards and backwards
alternate:

    rank 0    F0 F1          BW0    F2      BW1      BW2     stage 0
    rank 1       F0 BW0   F1    BW1    F2 BW2                stage 1

A plan contains no messages, because they follow from the actions: F of a stage needs the output of the previous stage,
B needs the gradient from the next stage, and W needs the state that its own B has stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

__all__: list[str] = []

Seconds = float | Sequence[float]  # one number for all stages, or one for each stage


class Action(NamedTuple):
    """One action of a rank.

    ``kind`` is ``"F"`` (forward), ``"B"`` (gradient of the stage's input), ``"W"`` (gradients of its weights) or
    ``"BW"`` (both: a backward that is not split).

    >>> print(Action("F", stage=0, micro=2))
    F(stage 0, micro-batch 2)
    """

    kind: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, micro-batch {self.micro})"


@dataclass(frozen=True)
class PlanData:
    """A pipeline plan. ``rank_of[stage]``: the rank of a stage; ``actions[rank]``: the actions of a rank, in order."""

    name: str
    ranks: int
    stages: int
    num_microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...] = field(repr=False)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The actions that must precede an action; the results of those on other ranks arrive as messages."""
        kind, stage, micro = action
        if kind == "W":
            return (Action("B", stage, micro),)
        if kind == "F":
            return () if stage == 0 else (Action("F", stage - 1, micro),)
        own = Action("F", stage, micro)
        if stage == self.stages - 1:
            return (own,)
        whole_backward = Action("BW", stage + 1, micro)
        return own, (whole_backward if whole_backward in self.places else Action("B", stage + 1, micro))

    @cached_property
    def places(self) -> dict[Action, tuple[int, int]]:
        """Rank and position of every action."""
        return {action: (rank, at) for rank, actions in enumerate(self.actions) for at, action in enumerate(actions)}

    def peak(self, rank: int) -> int:
        """The most activations that a rank holds at once; each is held from its F until its W or BW."""
        held = most = 0
        for kind, _, _ in self.actions[rank]:
            held += {"F": 1, "B": 0, "W": -1, "BW": -1}[kind]
            most = max(most, held)
        return most

    def peaks(self) -> tuple[int, ...]:
        """:meth:`peak` of every rank."""
        return tuple(map(self.peak, range(self.ranks)))
