"""Detects which processes have ended, wherever they run, and which hosts answer nothing.

A process listens at its address while it runs (:mod:`dist_prims.rendezvous.served`). After its end nothing listens
there, so the kernel of its host refuses a connection.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ..rendezvous.served import answers

__all__: list[str] = []

_INTERVAL = 0.1  # seconds between probes; more if the last probe took more than half of it
_PROBE_TIME = 0.1  # seconds in which a host must answer
_TIME_IN_DOUBT = 0.5  # seconds in which a host must answer if a host did not answer the last probe
_CLOSED_PORT = 1  # which the kernel of a host refuses, even if its processes are stopped


class ProcessProbe:
    """Connects to the addresses of processes at intervals: each time is a *probe*.

    A process has the position of its address in ``addresses``. ``silent`` has the positions of those whose hosts have
    not answered two probes in a row. ``first`` is the time in seconds until the first probe.

    >>> probe = ProcessProbe(["127.0.0.1:1"], first=0)
    >>> probe.ended([0]), probe.silent
    ({0}, set())
    """

    def __init__(self, addresses: Sequence[str], first: float) -> None:
        self._addresses = addresses
        self._next = time.monotonic() + first
        self._ended: set[int] = set()
        self._in_doubt: set[str] = set()  # hosts that have not answered the last probe
        self.silent: set[int] = set()

    def ended(self, watched: Iterable[int]) -> set[int]:
        """Return the processes that are known to have ended, after a probe of the ``watched`` ones if it is due."""
        began = time.monotonic()
        if began >= self._next:
            running = {position: self._addresses[position] for position in watched if position not in self._ended}
            asked = {*running.values(), *(f"{host}:{_CLOSED_PORT}" for host in self._in_doubt)}
            is_listening = answers(asked, _TIME_IN_DOUBT if self._in_doubt else _PROBE_TIME)
            self._ended |= {position for position, address in running.items() if not is_listening.get(address, True)}
            # A host that has answered for none of its addresses is in doubt, and silent if it was in doubt before.
            unanswered = set(map(_host, asked)) - set(map(_host, is_listening))
            silent_hosts = unanswered & self._in_doubt
            self.silent = {position for position, address in running.items() if _host(address) in silent_hosts}
            self._in_doubt = unanswered
            after = time.monotonic()
            self._next = after + max(_INTERVAL, 2 * (after - began))
        return self._ended


def _host(address: str) -> str:
    return address.rpartition(":")[0]
