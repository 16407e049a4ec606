"""A pipeline schedule as data: which stage each rank computes for which micro-batch, in which order.

A model is cut into stages, a batch into micro-batches. How well the ranks are used depends on nothing but the order in
which each takes its work. As code that computes and sends, an order can only be run; as a list it can be proved free
of deadlock, priced, drawn, and run over any engine. 2 ranks, 3 micro-batches, one forward and one backward in turn:

    rank 0    F0 F1          BW0    F2      BW1      BW2     stage 0
    rank 1       F0 BW0   F1    BW1    F2 BW2                stage 1

An action says nothing of messages, for they follow from it: F of a stage needs the output of the stage before, B the
gradient from the stage behind, and W what its own B has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, overload

if TYPE_CHECKING:
    from .cost import PipelineCost

__all__ = ["Action", "PipelinePlan", "Seconds"]

Seconds = float | Sequence[float]  # of every stage alike, or of each


class Action(NamedTuple):
    """What a rank does next.

    ``kind`` is ``"F"`` (forward), ``"B"`` (gradient of the stage's input), ``"W"`` (gradients of its weights) or
    ``"BW"`` (both in one: a backward that is not split).
    """

    kind: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, micro-batch {self.micro})"


@dataclass(frozen=True)
class PipelinePlan:
    """The order of work of every rank. ``rank_of[stage]`` owns the stage; ``actions[rank]`` is that rank's order.

    >>> from dist_prims.schedules.pipelines import pipeline_plan
    >>> plan = pipeline_plan("1f1b", ranks=2, num_microbatches=3)
    >>> plan.verify()
    >>> [f"{kind}{micro}" for kind, stage, micro in plan.actions[0]]
    ['F0', 'F1', 'BW0', 'F2', 'BW1', 'BW2']
    >>> plan.peaks()
    (2, 1)
    >>> plan.cost(forward=1.0, input_grad=1.0, weight_grad=1.0).bubble
    0.25
    """

    name: str
    ranks: int
    stages: int
    num_microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...] = field(repr=False)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """What must be done before an action; what another rank does of it arrives as a message."""
        kind, stage, micro = action
        if kind == "W":
            return (Action("B", stage, micro),)
        if kind == "F":
            return () if stage == 0 else (Action("F", stage - 1, micro),)
        own = Action("F", stage, micro)
        if stage == self.stages - 1:
            return (own,)
        behind = Action("BW", stage + 1, micro)
        return own, behind if behind in self.places else Action("B", stage + 1, micro)

    @cached_property
    def places(self) -> dict[Action, tuple[int, int]]:
        """Rank and position of every action."""
        return {action: (rank, at) for rank, actions in enumerate(self.actions) for at, action in enumerate(actions)}

    def verify(self) -> None:
        """Prove that all work is done once, where its stage is, and that no rank waits for ever.

        ScheduleError, a ValueError, with rank, position and action otherwise.

        What has to be promised for the proof to hold when the plan is run: see :mod:`.proof`.
        """
        from .proof import verify

        verify(self)

    def peak(self, rank: int) -> int:
        """Most activations that a rank holds at once: each from the F of a stage and micro-batch until its W or BW."""
        held = most = 0
        for kind, _, _ in self.actions[rank]:
            held += {"F": 1, "B": 0, "W": -1, "BW": -1}[kind]
            most = max(most, held)
        return most

    def peaks(self) -> tuple[int, ...]:
        """:meth:`peak` of every rank."""
        return tuple(map(self.peak, range(self.ranks)))

    def cost(
        self, forward: Seconds = 1.0, input_grad: Seconds = 1.0, weight_grad: Seconds = 1.0, transfer: float = 0.0
    ) -> PipelineCost:
        """What a step takes, from the seconds of a micro-batch: of every stage alike, or of each.

        ``transfer``: seconds from the end of an action to when another rank has its result, which both ranks spend
        computing if they have something to compute.
        """
        from .cost import price

        return price(self, forward, input_grad, weight_grad, transfer)

    @overload
    def draw(self, path: None = None, times: PipelineCost | None = None) -> str: ...
    @overload
    def draw(self, path: str | Path, times: PipelineCost | None = None) -> Path: ...
    def draw(self, path: str | Path | None = None, times: PipelineCost | None = None) -> str | Path:
        """A row for each rank, time to the right: an SVG picture under ``path``, or text; ``times`` of :meth:`cost`."""
        from .draw import caption, draw_gantt, text_gantt

        rows = (times or self.cost()).rows
        return text_gantt(rows, caption(self)) if path is None else draw_gantt(path, rows, caption(self))
