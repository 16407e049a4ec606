"""A pipeline plan: for each rank the ordered list of the stages and micro-batches that it computes.

A model is cut into stages, a batch into micro-batches. The utilization of the ranks depends only on the order in which
each rank does its work. Written as code that computes and sends, an order can only be run. Written as a list, it can be
proved free of deadlock, priced, drawn, and run by any engine. 2 ranks, 3 micro-batches, forwards and backwards
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
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, overload

if TYPE_CHECKING:
    from .cost import PipelineCost

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
class PipelinePlan:
    """A pipeline plan. ``rank_of[stage]``: the rank of a stage; ``actions[rank]``: the actions of a rank, in order.

    >>> from dist_prims.schedules.pipelines import pipeline_plan
    >>> plan = pipeline_plan("1f1b", ranks=2, num_microbatches=3)
    >>> plan
    PipelinePlan(name='1f1b', ranks=2, stages=2, num_microbatches=3, rank_of=(0, 1))
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
        """The actions that must precede an action; the results of those on other ranks arrive as messages."""
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
        """Prove that every action runs once, on the rank of its stage, and that no deadlock is possible.

        Raises ScheduleError, a ValueError, with rank, position and action. ``proof`` lists the conditions that a
        run must meet for the proof to hold.
        """
        from .proof import verify

        verify(self)

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

    def cost(
        self, forward: Seconds = 1.0, input_grad: Seconds = 1.0, weight_grad: Seconds = 1.0, transfer: float = 0.0
    ) -> PipelineCost:
        """The cost of a step, from the seconds of F, B and W of a micro-batch: one number, or one for each stage.

        ``transfer``: seconds from the end of an action until another rank has its result; both ranks can compute
        meanwhile.
        """
        from .cost import price

        return price(self, forward, input_grad, weight_grad, transfer)

    @overload
    def draw(self, path: None = None, times: PipelineCost | None = None) -> str: ...
    @overload
    def draw(self, path: str | Path, times: PipelineCost | None = None) -> Path: ...
    def draw(self, path: str | Path | None = None, times: PipelineCost | None = None) -> str | Path:
        """Draw a Gantt chart: an SVG picture at ``path``, or text; ``times`` is a result of :meth:`cost`."""
        from .draw import caption, draw_gantt, text_gantt

        rows = (times or self.cost()).rows
        return text_gantt(rows, caption(self)) if path is None else draw_gantt(path, rows, caption(self))

    def html(self, path: str | Path) -> Path:
        """Write an interactive page: the Gantt chart for any durations, bubble and memory. Returns the path."""
        from ..html.document import write_html
        from ..html.pipeline_data import pipeline_page

        return write_html(pipeline_page(self), path)

    def _repr_html_(self) -> str | None:
        """The page, for a notebook; None, and so the text, for a plan that is too large or cannot run."""
        from ..html.document import in_notebook
        from ..html.pipeline_data import pipeline_page

        try:
            return in_notebook(pipeline_page(self))
        except ValueError:
            return None
