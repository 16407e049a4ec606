"""PipelinePlan: a plan with its proof, cost, picture and page."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import overload

from ..html.document import in_notebook, write_html
from ..html.pipeline_data import pipeline_page
from .actions import PlanData, Seconds
from .cost import PipelineCost, price
from .draw import caption, draw_gantt, text_gantt
from .proof import verify
from .registry import plan_data

__all__: list[str] = []


@dataclass(frozen=True)
class PipelinePlan(PlanData):
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

    def verify(self) -> None:
        """Prove that every action runs once, on the rank of its stage, and that no deadlock is possible.

        Raises ScheduleError, a ValueError, with rank, position and action. ``proof`` lists the conditions that a
        run must meet for the proof to hold.
        """
        verify(self)

    def cost(
        self, forward: Seconds = 1.0, input_grad: Seconds = 1.0, weight_grad: Seconds = 1.0, transfer: float = 0.0
    ) -> PipelineCost:
        """The cost of a step, from the seconds of F, B and W of a micro-batch: one number, or one for each stage.

        ``transfer``: seconds from the end of an action until another rank has its result; both ranks can compute
        meanwhile.
        """
        return price(self, forward, input_grad, weight_grad, transfer)

    @overload
    def draw(self, path: None = None, times: PipelineCost | None = None) -> str: ...
    @overload
    def draw(self, path: str | Path, times: PipelineCost | None = None) -> Path: ...
    def draw(self, path: str | Path | None = None, times: PipelineCost | None = None) -> str | Path:
        """Draw a Gantt chart: an SVG picture at ``path``, or text; ``times`` is a result of :meth:`cost`."""
        rows = (times or self.cost()).rows
        return text_gantt(rows, caption(self)) if path is None else draw_gantt(path, rows, caption(self))

    def html(self, path: str | Path) -> Path:
        """Write an interactive page: the Gantt chart for any durations, bubble and memory. Returns the path."""
        return write_html(pipeline_page(self), path)

    def _repr_html_(self) -> str | None:
        """The page, for a notebook; None, and so the text, for a plan that is too large or cannot run."""
        try:
            return in_notebook(pipeline_page(self))
        except ValueError:
            return None


def pipeline_plan(name: str, ranks: int, num_microbatches: int, stages_a_rank: int | None = None) -> PipelinePlan:
    """The plan of a schedule for a number of ranks and micro-batches; ``stages_a_rank``: default of the schedule.

    >>> plan = pipeline_plan("zbv", ranks=2, num_microbatches=4)
    >>> plan.stages, plan.rank_of
    (4, (0, 1, 1, 0))
    """
    data = plan_data(name, ranks, num_microbatches, stages_a_rank)
    return PipelinePlan(*(getattr(data, field.name) for field in fields(data)))
