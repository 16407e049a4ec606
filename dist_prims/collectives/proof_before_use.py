"""Verification of user-defined schedules before their first run: rank 0 proves, the other ranks read its result.

All ranks of a group execute the same schedule, so one proof is sufficient. Rank 0 writes the result to the group's
store under a hash of the steps, and does not remove it. A rank whose own steps differ finds no result, and raises an
error at its timeout.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import CommTimeoutError
from ..schedules import Schedule, ScheduleError
from ..schedules.trust import MOST_RANKS, fingerprint, is_trusted
from ..torch_compat import group_store

__all__: list[str] = []

_VERIFIED = "verified"
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Proofs] = weakref.WeakKeyDictionary()


class Proofs:
    """The schedules that one group may run. The ranks share ``store``; without a store every rank proves."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._known: set[str] = set()

    def require(self, schedule: Schedule, timeout: timedelta) -> None:
        """Return if the schedule is correct; raise ScheduleError on every rank of the group if it is not."""
        if is_trusted(schedule):
            return
        what = f"rank {self._rank}: {schedule.collective} {schedule.algorithm!r} for {schedule.size} ranks"
        if schedule.size > MOST_RANKS:
            raise ScheduleError(
                f"{what} is not proved: above {MOST_RANKS} ranks a proof takes too long. Prove it for fewer ranks "
                "(python -m dist_prims prove FILE.py), and register it with algorithm(..., trust=True)"
            )
        digest = fingerprint(schedule)
        if digest in self._known:
            return
        result = self._publish(digest, schedule) if self._rank == 0 else self._read(digest, schedule, timeout, what)
        if result != _VERIFIED:
            raise ScheduleError(
                f"{what} is wrong, no data was touched: {result}. Correct it, unregister it "
                f"(dist_prims.schedules.unregister({schedule.collective!r}, {schedule.algorithm!r})), or name another "
                "algorithm"
            )
        self._known.add(digest)

    def _publish(self, digest: str, schedule: Schedule) -> str:
        result = _result(digest, schedule)
        if self._store is not None:
            self._store.set(_key(digest), result)
        return result

    def _read(self, digest: str, schedule: Schedule, timeout: timedelta, what: str) -> str:
        if self._store is None:
            return _result(digest, schedule)
        try:
            self._store.wait([_key(digest)], timeout)
        except RuntimeError as error:
            raise CommTimeoutError(
                f"{what}: rank 0 has not published a proof of these steps within {timeout.total_seconds():g} s. Every "
                "rank must register the same steps under this name and make the same call"
            ) from error
        return str(self._store.get(_key(digest)).decode())


def _key(digest: str) -> str:
    return f"dist_prims proof {digest}"


_results: dict[str, str] = {}


def _result(digest: str, schedule: Schedule) -> str:
    """Prove a schedule in this process and return the result. Equal steps are proved once."""
    if digest not in _results:
        try:
            schedule.verify()
            _results[digest] = _VERIFIED
        except ScheduleError as error:
            _results[digest] = str(error)
    return _results[digest]


def proofs_of(group: dist.ProcessGroup) -> Proofs:
    """Return the proofs of a group of ``torch.distributed``, which exist as long as the group."""
    if group not in _groups:
        _groups[group] = Proofs(group_store(group), group.rank())
    return _groups[group]
