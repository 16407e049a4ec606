"""Detects that a process has died while its rank is awaited in a group that is being made.

The ranks of the new group have no connections yet. The default group knows their processes: it watches the processes
of this host, and each process of another host listens at an address while it runs
(:mod:`dist_prims.rendezvous.served`).

The end of a connection of the default group does not show a death on another host: a rank has connections to some ranks
only, and a rank whose default group has failed closes them although its process runs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import PeerDiedError
from ..rendezvous.deadline import until
from ..rendezvous.served import answers

__all__: list[str] = []

_BETWEEN_PROBES = 1.0  # seconds, also until the first probe: most groups are made before it
_MOST_PROBED = 64  # processes in one probe: each process is asked by all ranks, so by few of them in a second
_PROBE_TIME = 0.1  # seconds in which a host must answer
_EXIT_TIME = 0.5 + _BETWEEN_PROBES  # seconds from the end of a connection until the end of its process is known


class DeathMonitor:
    """Detects that a rank has died while its group is created.

    Args:
        rank: this rank, for errors.
        ended: returns the ranks of the new group whose processes have ended, the ranks of this host first; ``list`` if
            nothing is known about them.
    """

    def __init__(self, rank: int, ended: Callable[[], list[int]]) -> None:
        self._rank, self.ended = rank, ended

    def first_dead(self) -> int:
        """Return a rank of the new group whose process has ended; -1 if there is none.

        C++ calls it too, and ignores a rank of another host.
        """
        return next(iter(self.ended()), -1)

    def check(self) -> None:
        """Raise PeerDiedError if a process has ended."""
        if (culprit := self.first_dead()) >= 0:
            raise PeerDiedError(
                f"rank {self._rank}: rank {culprit} has died while the group was made; see the last output of that "
                "rank, and start the group again"
            )

    def wait_for_keys(self, store: Any, keys: list[str]) -> None:
        """Wait until the store has the keys; RuntimeError after the timeout of the store, PeerDiedError after a death.

        The store is polled. A thread that waits within torch's TCPStore finds no death, and each wait there that ends
        by a short timeout prints two warnings. Where no death can be found the call returns at once: the next request
        to the store waits.
        """
        if self.ended is list:
            return

        def have_come() -> Any:
            self.check()
            return store.check(keys)

        try:
            until(have_come, time.monotonic() + store.timeout.total_seconds(), f"the keys {keys}")
        except TimeoutError as error:
            raise RuntimeError(str(error)) from error  # as of a store

    def wait_and_raise(self) -> None:
        """Raise PeerDiedError if a process ends soon: its connections end a little before the process."""
        deadline = time.monotonic() + _EXIT_TIME
        while time.monotonic() < deadline:
            self.check()
            time.sleep(0.01)


class RemoteProcesses:
    """Detects which processes of other hosts have ended: nothing listens at their addresses any more.

    Nothing is known of a process whose host does not answer. ``addresses``: by rank, where each process listens.

    >>> processes = RemoteProcesses({3: "127.0.0.1:1"}, between_probes=0)
    >>> processes.ended()
    [3]
    """

    def __init__(self, addresses: Mapping[int, str], between_probes: float = _BETWEEN_PROBES) -> None:
        self._running = [*addresses.items()]  # not known to have ended; the first are asked in the next probe
        self._ended: list[int] = []
        self._between_probes = between_probes
        self._next = time.monotonic() + between_probes

    def ended(self) -> list[int]:
        """Return the ranks whose processes are known to have ended, after a probe of some processes if it is due."""
        if self._running and time.monotonic() >= self._next:
            probed, others = self._running[:_MOST_PROBED], self._running[_MOST_PROBED:]
            is_listening: dict[str, bool] = {}
            with contextlib.suppress(OSError):  # this process has no descriptor or port left: nothing is known
                is_listening = answers([address for _, address in probed], _PROBE_TIME)
            refused = [rank for rank, address in probed if is_listening.get(address) is False]
            self._ended += refused
            self._running = others + [(rank, address) for rank, address in probed if rank not in refused]
            self._next = time.monotonic() + self._between_probes
        return self._ended
