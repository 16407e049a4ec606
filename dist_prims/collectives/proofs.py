"""Proof before the first run: rank 0 verifies a schedule that the package does not know, the others read its verdict.

Every rank of a group is about to follow the same schedule, so one proof is enough. Rank 0 leaves the verdict in the
group's store under a hash of the steps, where it stays; a rank whose own steps differ finds none, and says so when
time is up.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import CommTimeout
from ..schedules import Schedule, ScheduleError
from ..schedules.trust import MOST_RANKS, fingerprint, is_trusted
from ..torch_compat import group_store

__all__ = ["Proofs", "proofs_of"]

_RIGHT = "verified"
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Proofs] = weakref.WeakKeyDictionary()


class Proofs:
    """The schedules that one group may run. ``store`` is shared by its ranks; without one every rank proves."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._known: set[str] = set()

    def require(self, schedule: Schedule, timeout: timedelta) -> None:
        """Return if the schedule is right; ScheduleError on every rank of the group if it is not."""
        if is_trusted(schedule):
            return
        what = f"rank {self._rank}: {schedule.collective} {schedule.algorithm!r} for {schedule.size} ranks"
        if schedule.size > MOST_RANKS:
            raise ScheduleError(
                f"{what} is not proved: above {MOST_RANKS} ranks that takes too long. Prove it for fewer ranks (python "
                "-m dist_prims prove FILE.py), and register it with algorithm(..., trust=True)"
            )
        mark = fingerprint(schedule)
        if mark in self._known:
            return
        verdict = self._publish(mark, schedule) if self._rank == 0 else self._read(mark, schedule, timeout, what)
        if verdict != _RIGHT:
            raise ScheduleError(
                f"{what} is wrong, no data was touched: {verdict}. Mend it, unregister it "
                f"(dist_prims.schedules.unregister({schedule.collective!r}, {schedule.algorithm!r})), or name another "
                "algorithm"
            )
        self._known.add(mark)

    def _publish(self, mark: str, schedule: Schedule) -> str:
        verdict = _verdict(mark, schedule)
        if self._store is not None:
            self._store.set(_key(mark), verdict)
        return verdict

    def _read(self, mark: str, schedule: Schedule, timeout: timedelta, what: str) -> str:
        if self._store is None:
            return _verdict(mark, schedule)
        try:
            self._store.wait([_key(mark)], timeout)
        except RuntimeError as error:
            raise CommTimeout(
                f"{what}: rank 0 has not published a proof of these steps within {timeout.total_seconds():g} s. Every "
                "rank must register the same steps under this name and make the same call"
            ) from error
        return str(self._store.get(_key(mark)).decode())


def _key(mark: str) -> str:
    return f"dist_prims proof {mark}"


_verdicts: dict[str, str] = {}


def _verdict(mark: str, schedule: Schedule) -> str:
    """The verdict of this process on a schedule; equal steps are proved once."""
    if mark not in _verdicts:
        try:
            schedule.verify()
            _verdicts[mark] = _RIGHT
        except ScheduleError as error:
            _verdicts[mark] = str(error)
    return _verdicts[mark]


def proofs_of(group: dist.ProcessGroup) -> Proofs:
    """The proofs of a group of ``torch.distributed``, which live as long as the group."""
    if group not in _groups:
        _groups[group] = Proofs(group_store(group), group.rank())
    return _groups[group]
