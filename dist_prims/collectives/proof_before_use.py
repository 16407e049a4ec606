"""Verification of user-defined schedules before their first run.

Every rank proves for itself. Ranks compare the fingerprints of their steps before, so that all of them find the same
result, and no rank waits for a proof of another one, which may have taken another branch. A first design let rank 0
prove and publish the result in the group's store: a rank whose steps differed waited for the whole timeout.
"""

from __future__ import annotations

from ..schedules import Schedule, ScheduleError
from ..schedules.trust import MOST_RANKS, is_trusted, problem_of, remedy_of

__all__: list[str] = []


def require_proof(schedule: Schedule, rank: int) -> None:
    """Return if the schedule is correct; raise ScheduleError if it is not."""
    if is_trusted(schedule):
        return
    what = f"rank {rank}: {schedule.collective} {schedule.algorithm!r} for {schedule.size} ranks"
    if schedule.size > MOST_RANKS:
        raise ScheduleError(
            f"{what} is not proved: above {MOST_RANKS} ranks a proof takes too long. Prove it for fewer ranks "
            "(python -m dist_prims prove FILE.py), and register it with algorithm(..., trust=True)"
        )
    if problem := problem_of(schedule):
        raise ScheduleError(
            f"{what} is wrong, no data was touched: {problem}. Correct it, {remedy_of(schedule)}, or name another "
            "algorithm"
        )
