"""Check of answers that are the order of a pipeline: the proof, then the activations held and the duration."""

from __future__ import annotations

from collections.abc import Callable

from ..schedules import ScheduleError
from ..schedules.pipelines import PipelinePlan, pipeline_plan
from .answer import Answer
from .exercise import WrongAnswerError

__all__: list[str] = []

COUNTS = [(ranks, count) for ranks in range(1, 6) for count in (1, 2, 3, 5, 8, 12)]


def check_plans(answer: Answer, reference: str, most_held: Callable[[int, int, int], int]) -> str:
    """Prove the plans of the learner's ``order(rank, ranks, num_microbatches)``, and compare them with limits.

    A rank has one stage, and holds at most ``most_held(rank, ranks, num_microbatches)`` activations. A step must not
    take longer than the ``reference``.
    """
    for ranks, count in COUNTS:
        plan = _plan(answer, ranks, count)
        here = f"{ranks} ranks, {count} micro-batches"
        for rank, held in enumerate(plan.peaks()):
            if held > (allowed := most_held(rank, ranks, count)):
                raise WrongAnswerError(
                    f"{here}: the order is right, but rank {rank} holds {held} activations at once; {allowed} are "
                    f"enough\n{plan.draw()}"
                )
        duration, limit = plan.cost().makespan, pipeline_plan(reference, ranks, count).cost().makespan
        if duration > limit:
            raise WrongAnswerError(
                f"{here}: the order is right, but the step takes {duration:g} time units; {limit:g} are "
                f"enough\n{plan.draw()}"
            )
    return f"proved for 1 to {COUNTS[-1][0]} ranks, within the limits of memory and time"


def _plan(answer: Answer, ranks: int, count: int) -> PipelinePlan:
    actions = tuple(answer.actions("order", rank, ranks, count) for rank in range(ranks))
    plan = PipelinePlan("answer", ranks, ranks, count, tuple(range(ranks)), actions)
    try:
        plan.verify()
    except ScheduleError as error:
        raise WrongAnswerError(f"{ranks} ranks, {count} micro-batches: {error}") from error
    return plan
