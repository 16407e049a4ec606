"""Proof that a plan runs every action once, on the right rank, and cannot deadlock.

At run time a wrong plan shows only as a hang: two ranks wait for each other. The proof executes the plan without its
work: every rank advances until it needs an action that another rank has not done yet. If all ranks stop before the end,
each waits for an action of a rank that waits itself, so these waits contain a cycle, and the error names it. Durations
do not matter: an order that ends under these rules ends for any durations of actions and messages.

The proof assumes of a run:

- A send does not wait for the receiver. With blocking sends 1F1B hangs: rank 0 sends F1 while rank 1 sends back BW0.
- Messages between two ranks are matched by identity, not by order alone. From one stage to the next, messages are
  consumed in the order of sending in every schedule here; between two ranks with two stages each they are not.

The number of messages in flight is bounded. A message F(s, m) that is not yet consumed belongs to an activation of
stage s that is still held, because the backward that frees it comes later. A gradient B(s, m) that is not yet consumed
belongs to an activation of stage s-1. So from stage to stage no more messages are in flight than the peak of the
activations of that stage.
"""

from __future__ import annotations

from ..schedule_error import ScheduleError
from .actions import Action, PlanData

__all__: list[str] = []


def verify(plan: PlanData) -> None:
    """Raise ScheduleError unless the plan is complete and free of deadlock."""
    _check_shape(plan)
    _check_actions(plan)
    _check_complete(plan)
    replay(plan)


def _check_shape(plan: PlanData) -> None:
    if plan.ranks < 1 or plan.num_microbatches < 1:
        raise ScheduleError(
            f"plan {plan.name}: ranks={plan.ranks}, num_microbatches={plan.num_microbatches}; both must be at least 1"
        )
    if len(plan.actions) != plan.ranks:
        raise ScheduleError(f"plan {plan.name}: actions has {len(plan.actions)} ranks, but ranks={plan.ranks}")
    if len(plan.rank_of) != plan.stages:
        raise ScheduleError(f"plan {plan.name}: rank_of has {len(plan.rank_of)} stages, but stages={plan.stages}")
    for stage, rank in enumerate(plan.rank_of):
        if not 0 <= rank < plan.ranks:
            raise ScheduleError(f"plan {plan.name}: stage {stage} is on rank {rank}; ranks are 0..{plan.ranks - 1}")


def _check_actions(plan: PlanData) -> None:
    """Check each action: known kind, in range, on the right rank, no duplicate."""
    seen: set[Action] = set()
    for rank, actions in enumerate(plan.actions):
        for at, action in enumerate(actions):
            kind, stage, micro = action
            here = f"rank {rank}, position {at}: {action}"
            if kind not in ("F", "B", "W", "BW"):
                raise ScheduleError(f"{here} has an unknown kind; kinds are F, B, W and BW")
            if not (0 <= stage < plan.stages and 0 <= micro < plan.num_microbatches):
                valid = f"stages are 0..{plan.stages - 1}, micro-batches 0..{plan.num_microbatches - 1}"
                raise ScheduleError(f"{here} is out of range; {valid}")
            if plan.rank_of[stage] != rank:
                raise ScheduleError(f"{here} is on the wrong rank; stage {stage} is on rank {plan.rank_of[stage]}")
            if action in seen:
                raise ScheduleError(f"{here} occurs twice")
            seen.add(action)


def _check_complete(plan: PlanData) -> None:
    """Check that every stage has, for every micro-batch, one F and either a BW or a B and a W."""
    for stage, rank in enumerate(plan.rank_of):
        for micro in range(plan.num_microbatches):
            has = {kind: Action(kind, stage, micro) in plan.places for kind in ("F", "B", "W", "BW")}
            where = f"rank {rank}: stage {stage}, micro-batch {micro}"
            if has["BW"] and (has["B"] or has["W"]):
                raise ScheduleError(f"{where} has BW and {'B' if has['B'] else 'W'}: a gradient would be counted twice")
            if not has["F"]:
                raise ScheduleError(f"{where} lacks F")
            if not (has["BW"] or (has["B"] and has["W"])):
                what = "W" if has["B"] else "B" if has["W"] else "BW, or B and W"
                raise ScheduleError(f"{where} lacks {what}")


def replay(plan: PlanData) -> list[Action]:
    """All actions in an order that respects the dependencies; ScheduleError if there is none."""
    order: list[Action] = []
    done: set[Action] = set()
    at = [0] * plan.ranks
    waiting: dict[Action, list[int]] = {}  # the ranks that wait for an action
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
        raise ScheduleError(_cycle(plan, at, {rank: needed for needed, ranks in waiting.items() for rank in ranks}))
    return order


def _cycle(plan: PlanData, at: list[int], needed: dict[int, Action]) -> str:
    """An error text that follows the waits from rank to rank until a rank repeats."""
    for rank, action in needed.items():
        if action not in plan.places:
            return (
                f"rank {rank}, position {at[rank]}: {plan.actions[rank][at[rank]]} needs {action}, which no rank does"
            )
    path = [min(needed)]
    while (awaited := plan.places[needed[path[-1]]][0]) not in path:
        path.append(awaited)
    waits = []
    for rank in path[path.index(awaited) :]:
        owner, place = plan.places[needed[rank]]
        action = plan.actions[rank][at[rank]]
        owner_name = "the same rank" if owner == rank else f"rank {owner}"
        wait = f"{action} waits for {needed[rank]}, which {owner_name} does at position {place}"
        waits.append(f"rank {rank}, position {at[rank]}: {wait}")
    return f"plan {plan.name} would deadlock: " + "; ".join(waits)
