"""The data of the page of a pipeline plan: its actions, and which of them each one waits for.

When an action begins follows from the durations: as soon as its rank is free and its inputs have arrived. The page
computes it from the list of the actions that each action waits for, for any durations, so the list is the cost model.
"""

from __future__ import annotations

from typing import Any

from ..pipelines.actions import Action, PlanData
from ..pipelines.draw import caption
from ..pipelines.proof import replay
from ..pipelines.registry import lookup, pipeline_plans, plan_data
from .document import Page

__all__: list[str] = []

MOST_ACTIONS = 24_000
_SCRIPTS = ("format", "elements", "player", "chart", "gantt", "pipeline")


def pipeline_page(plan: PlanData) -> Page:
    """The page of a plan, with the same schedule for other numbers of micro-batches if it is registered.

    >>> from dist_prims.schedules.pipelines import pipeline_plan
    >>> data = pipeline_page(pipeline_plan("1f1b", ranks=2, num_microbatches=3)).data
    >>> data["microbatches"], sorted(map(int, data["plans"]))[:3]
    (3, [1, 2, 3])
    """
    if sum(map(len, plan.actions)) > MOST_ACTIONS:
        raise ValueError(
            f"page: {caption(plan)} has {sum(map(len, plan.actions)):,} actions; a page shows at most "
            f"{MOST_ACTIONS:,}; use fewer micro-batches"
        )
    data = {
        "name": plan.name,
        "ranks": plan.ranks,
        "stages": plan.stages,
        "rankOf": list(plan.rank_of),
        "microbatches": plan.num_microbatches,
        "idea": lookup(plan.name).card.idea if _is_registered(plan) else "",
        "plans": {str(member.num_microbatches): _actions(member) for member in _family(plan)},
    }
    return Page(caption(plan), _SCRIPTS, data)


def _is_registered(plan: PlanData) -> bool:
    if plan.name not in pipeline_plans():
        return False
    again = plan_data(plan.name, plan.ranks, plan.num_microbatches, plan.stages // plan.ranks)
    return (again.rank_of, again.actions) == (plan.rank_of, plan.actions)


def _family(plan: PlanData) -> list[PlanData]:
    """The plan, and the plans of the same schedule for 1, 2, 3, ... micro-batches, as many as a page can hold."""
    family = {plan.num_microbatches: plan}
    left = MOST_ACTIONS - sum(map(len, plan.actions))
    for count in range(1, max(16, 2 * plan.num_microbatches) + 1) if _is_registered(plan) else ():
        if count in family:
            continue
        other = plan_data(plan.name, plan.ranks, count, plan.stages // plan.ranks)
        left -= sum(map(len, other.actions))
        if left < 0:
            break
        family[count] = other
    return list(family.values())


def _actions(plan: PlanData) -> list[tuple[Any, ...]]:
    """Rows (kind, stage, micro-batch, rows that the action waits for), in an order in which those rows come first."""
    rows: list[tuple[Any, ...]] = []
    row_of: dict[Action, int] = {}
    last_row: dict[int, int] = {}  # by rank
    for action in replay(plan):
        rank = plan.rank_of[action.stage]
        waits_for = [row_of[needed] for needed in plan.needs(action)]
        waits_for += [last_row[rank]] if rank in last_row and last_row[rank] not in waits_for else []
        last_row[rank] = row_of[action] = len(rows)
        rows.append((*action, waits_for))
    return rows
