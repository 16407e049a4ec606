"""Proof that a plan does all the work, once, where it belongs, and that no rank waits for ever.

A plan can be wrong in ways that a run shows only as a hang: two ranks that wait for each other. So the plan is
executed without its work: every rank goes on until it needs what another has not done yet. If all come to rest before
the end, each waits for an action of a rank that waits itself, and following these leads round a circle, which is
told. Times play no part: an order that ends under these rules ends whatever the actions and messages take.

What a run must promise for that to hold:

- A send does not wait for the receiver. 1F1B with sends that do hangs: rank 0 sends F1 while rank 1 sends back BW0.
- Messages between two ranks are matched by what they are, not by their order alone. From one stage to the next the
  order of sending is that of consuming in every schedule here; between two ranks with two stages each it is not.

How much can be under way is bounded without further ado. A message F(s, m) that is not yet consumed belongs to an
activation of stage s that is held, for the backward that frees it comes after; and a gradient B(s, m) that is not yet
consumed belongs to an activation of stage s - 1. So from stage to stage no more messages are under way than the peak
of the activations of that stage.
"""

from __future__ import annotations

from ..proof import ScheduleError
from .plan import Action, PipelinePlan

__all__ = ["replay", "verify"]


def verify(plan: PipelinePlan) -> None:
    """Raise ScheduleError unless the plan is right.

    >>> from dist_prims.schedules.pipelines import pipeline_plan
    >>> verify(pipeline_plan("interleaved_1f1b", ranks=3, num_microbatches=7))
    """
    _check_shape(plan)
    _check_actions(plan)
    _check_complete(plan)
    replay(plan)


def _check_shape(plan: PipelinePlan) -> None:
    if plan.ranks < 1 or plan.num_microbatches < 1:
        raise ScheduleError(
            f"plan {plan.name}: ranks={plan.ranks}, num_microbatches={plan.num_microbatches}; 1 is the least"
        )
    if len(plan.actions) != plan.ranks:
        raise ScheduleError(
            f"plan {plan.name}: it has the actions of {len(plan.actions)} ranks, and ranks={plan.ranks}"
        )
    if len(plan.rank_of) != plan.stages:
        raise ScheduleError(f"plan {plan.name}: rank_of names {len(plan.rank_of)} stages, and stages={plan.stages}")
    for stage, rank in enumerate(plan.rank_of):
        if not 0 <= rank < plan.ranks:
            raise ScheduleError(
                f"plan {plan.name}: stage {stage} is with rank {rank}; there are ranks 0..{plan.ranks - 1}"
            )


def _check_actions(plan: PipelinePlan) -> None:
    """Each action by itself: known, in range, on its rank, not twice."""
    seen: set[Action] = set()
    for rank, actions in enumerate(plan.actions):
        for at, action in enumerate(actions):
            kind, stage, micro = action
            here = f"rank {rank}, position {at}: {action}"
            if kind not in ("F", "B", "W", "BW"):
                raise ScheduleError(f"{here} is of no kind; there are F, B, W and BW")
            if not (0 <= stage < plan.stages and 0 <= micro < plan.num_microbatches):
                there = f"stages 0..{plan.stages - 1} and micro-batches 0..{plan.num_microbatches - 1}"
                raise ScheduleError(f"{here} does not exist; there are {there}")
            if plan.rank_of[stage] != rank:
                raise ScheduleError(f"{here} is on the wrong rank; stage {stage} is with rank {plan.rank_of[stage]}")
            if action in seen:
                raise ScheduleError(f"{here} is done twice")
            seen.add(action)


def _check_complete(plan: PipelinePlan) -> None:
    """Every stage has one F of every micro-batch, and either a BW or a B and a W."""
    for stage, rank in enumerate(plan.rank_of):
        for micro in range(plan.num_microbatches):
            has = {kind: Action(kind, stage, micro) in plan.places for kind in ("F", "B", "W", "BW")}
            who = f"rank {rank}: stage {stage}, micro-batch {micro}"
            if has["BW"] and (has["B"] or has["W"]):
                raise ScheduleError(f"{who} has BW and {'B' if has['B'] else 'W'}: a gradient would be counted twice")
            if not has["F"]:
                raise ScheduleError(f"{who} lacks F")
            if not (has["BW"] or (has["B"] and has["W"])):
                what = "W" if has["B"] else "B" if has["W"] else "BW, or B and W"
                raise ScheduleError(f"{who} lacks {what}")


def replay(plan: PipelinePlan) -> list[Action]:
    """All actions in an order in which each comes after what it needs; ScheduleError if there is none."""
    order: list[Action] = []
    done: set[Action] = set()
    at = [0] * plan.ranks
    waiting: dict[Action, list[int]] = {}  # for an action, who cannot go on before it
    ready = list(range(plan.ranks))
    while ready:
        rank = ready.pop()
        while at[rank] < len(plan.actions[rank]):
            action = plan.actions[rank][at[rank]]
            needed = next((each for each in plan.needs(action) if each not in done), None)
            if needed is not None:
                waiting.setdefault(needed, []).append(rank)
                break
            order.append(action)
            done.add(action)
            at[rank] += 1
            ready += waiting.pop(action, [])
    if waiting:
        raise ScheduleError(_circle(plan, at, {rank: needed for needed, ranks in waiting.items() for rank in ranks}))
    return order


def _circle(plan: PipelinePlan, at: list[int], needed: dict[int, Action]) -> str:
    """Who waits for what, from rank to rank until one comes again."""
    for rank, action in needed.items():
        if action not in plan.places:
            return (
                f"rank {rank}, position {at[rank]}: {plan.actions[rank][at[rank]]} needs {action}, which no rank does"
            )
    path = [min(needed)]
    while (behind := plan.places[needed[path[-1]]][0]) not in path:
        path.append(behind)
    told = []
    for rank in path[path.index(behind) :]:
        owner, place = plan.places[needed[rank]]
        action = plan.actions[rank][at[rank]]
        whose = "itself" if owner == rank else f"rank {owner}"
        what = f"{action} waits for {needed[rank]}, which {whose} does at position {place}"
        told.append(f"rank {rank}, position {at[rank]}: {what}")
    return f"plan {plan.name} would wait for ever: " + "; ".join(told)
