"""The cost of a plan: begin and end of every action, duration of a step, and the idle time of the ranks.

An action begins when its rank is free and its inputs have arrived. The result of another rank arrives ``transfer``
seconds after the end of its action; both ranks compute in the meantime. The order is fixed, so one pass over the
actions, in any order that respects the dependencies, gives all times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .actions import Action, PlanData, Seconds
from .proof import replay

__all__: list[str] = []


class Row(NamedTuple):
    """Begin and end of one action, measured or predicted; pictures are drawn from rows.

    >>> from dist_prims.schedules.pipelines import text_gantt
    >>> rows = [Row("F", 0, 0, begin=0.0, end=1.0, rank=0), Row("BW", 0, 0, begin=1.0, end=3.0, rank=0)]
    >>> print(text_gantt(rows))
    rank 0  F0 BW0--
    """

    kind: str
    stage: int
    micro: int
    begin: float
    end: float
    rank: int


@dataclass(frozen=True)
class PipelineCost:
    """The cost of a step. ``makespan``: its seconds; ``busy``: each rank's computing seconds; ``rows``: all actions.

    >>> from dist_prims.schedules.pipelines import pipeline_plan
    >>> cost = pipeline_plan("fill_drain", ranks=2, num_microbatches=2).cost()
    >>> cost
    PipelineCost(makespan=9.0, busy=(6.0, 6.0))
    >>> round(cost.bubble, 3), cost.gap
    (0.333, 3.0)
    """

    makespan: float
    busy: tuple[float, ...]
    rows: tuple[Row, ...] = field(repr=False)

    @property
    def bubble(self) -> float:
        """The average fraction of the step that the ranks are idle."""
        return 1 - self.used

    @property
    def used(self) -> float:
        """The average fraction of the step that the ranks compute: the best possible efficiency of a run."""
        return sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 1.0

    @property
    def gap(self) -> float:
        """The most seconds that any rank is idle between its first and its last action.

        The next step can use the idle time before and after, if no synchronization separates the steps.
        """
        ends: dict[int, tuple[float, float]] = {}
        for row in self.rows:
            first, last = ends.get(row.rank, (row.begin, row.end))
            ends[row.rank] = min(first, row.begin), max(last, row.end)
        return max((last - first - self.busy[rank] for rank, (first, last) in ends.items()), default=0.0)


def price(
    plan: PlanData,
    forward: Seconds = 1.0,
    input_grad: Seconds = 1.0,
    weight_grad: Seconds = 1.0,
    transfer: float = 0.0,
) -> PipelineCost:
    """The cost of a plan, from the seconds of F, B, W (BW takes as long as B and W) and of the transfer of a result."""
    seconds = _durations(plan, forward, input_grad, weight_grad)
    if not (math.isfinite(transfer) and transfer >= 0):
        raise ValueError(f"cost of plan {plan.name}: transfer={transfer} must be a finite number of seconds >= 0")
    free, busy = [0.0] * plan.ranks, [0.0] * plan.ranks
    end: dict[Action, float] = {}
    rows = []
    for action in replay(plan):
        rank = plan.rank_of[action.stage]
        begin = free[rank]
        for needed in plan.needs(action):
            begin = max(begin, end[needed] + (transfer if plan.rank_of[needed.stage] != rank else 0.0))
        duration = seconds[action.kind][action.stage]
        end[action] = free[rank] = begin + duration
        busy[rank] += duration
        rows.append(Row(*action, begin, begin + duration, rank))
    return PipelineCost(max(free), tuple(busy), tuple(rows))


def predict(plan: PlanData, rows: Iterable[Row]) -> PipelineCost:
    """The cost of a plan if every action takes the mean of its kind and stage in ``rows``, recorded from a run.

    >>> from dist_prims.schedules.pipelines import pipeline_plan
    >>> plan = pipeline_plan("zb_h1", ranks=2, num_microbatches=3)
    >>> cost = plan.cost(forward=[1, 2], input_grad=3, weight_grad=4)
    >>> predict(plan, cost.rows) == cost
    True
    """
    spent: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        spent.setdefault((row.kind, row.stage), []).append(row.end - row.begin)

    def mean(*kinds: str) -> list[float]:
        """The mean seconds of the kinds of each stage, added over the kinds."""
        recorded = [[spent.get((kind, stage), [0.0]) for kind in kinds] for stage in range(plan.stages)]
        return [sum(sum(times) / len(times) for times in of_stage) for of_stage in recorded]

    return price(plan, mean("F"), mean("B", "BW"), mean("W"))


def _durations(plan: PlanData, forward: Seconds, input_grad: Seconds, weight_grad: Seconds) -> dict[str, list[float]]:
    """The seconds of each kind of action: durations[kind][stage]."""
    table = {"F": _of_stages("forward", forward, plan), "B": _of_stages("input_grad", input_grad, plan)}
    table["W"] = _of_stages("weight_grad", weight_grad, plan)
    table["BW"] = [both + rest for both, rest in zip(table["B"], table["W"], strict=True)]
    return table


def _of_stages(name: str, seconds: Seconds, plan: PlanData) -> list[float]:
    """The seconds of every stage, from one number for all stages or one for each; ``name``: for errors."""
    values = np.asarray(seconds, np.float64)
    if values.shape not in ((), (plan.stages,)):
        raise ValueError(
            f"cost of plan {plan.name}: {name} has shape {values.shape} for {plan.stages} stages; "
            "pass one number, or one for each stage"
        )
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(f"cost of plan {plan.name}: {name}={seconds} must be a finite number of seconds >= 0")
    expanded: list[float] = np.broadcast_to(values, plan.stages).tolist()
    return expanded


def lower_bound(
    plan: PlanData,
    forward: Seconds = 1.0,
    input_grad: Seconds = 1.0,
    weight_grad: Seconds = 1.0,
    transfer: float = 0.0,
) -> float:
    """A lower bound in seconds for any order of the same work: the busiest rank, or one micro-batch forth and back."""
    seconds = _durations(plan, forward, input_grad, weight_grad)
    load = [0.0] * plan.ranks
    for stage, rank in enumerate(plan.rank_of):
        load[rank] += plan.num_microbatches * sum(seconds[kind][stage] for kind in "FBW")
    crossings = sum(a != b for a, b in zip(plan.rank_of, plan.rank_of[1:], strict=False))
    round_trip = sum(seconds["F"]) + sum(seconds["B"]) + seconds["W"][0] + 2 * crossings * transfer
    return max(*load, round_trip)
