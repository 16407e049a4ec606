"""Which processes have ended, wherever they run, and which hosts answer nothing.

Where a process has ended, nothing listens at its address any more: the kernel of its host refuses a connection.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ..rendezvous.served import answers

__all__: list[str] = []

_BETWEEN, _PROBE_TIME = 0.1, 0.1  # seconds
_TIME_IN_DOUBT = 0.5  # seconds for a host that has not answered the probe before
_CLOSED_PORT = 1  # which a host refuses, even if its processes accept nothing


class ProcessProbe:
    """Connects at intervals to addresses at which processes listen while they run: :mod:`dist_prims.rendezvous.served`.

    ``first`` is the time in seconds until the first probe. ``silent`` are the positions of the watched addresses whose
    hosts have not answered two probes in a row.

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
        """Return the positions of the addresses whose processes have ended; a probe asks the watched ones only."""
        began = time.monotonic()
        if began >= self._next:
            left = {each: self._addresses[each] for each in watched if each not in self._ended}
            asked = {*left.values(), *(f"{host}:{_CLOSED_PORT}" for host in self._in_doubt)}
            found = answers(asked, _TIME_IN_DOUBT if self._in_doubt else _PROBE_TIME)
            self._ended |= {each for each, address in left.items() if not found.get(address, True)}
            quiet = set(map(_host, asked)) - set(map(_host, found))
            self.silent = {each for each, address in left.items() if _host(address) in quiet & self._in_doubt}
            self._in_doubt = quiet
            after = time.monotonic()
            self._next = after + max(_BETWEEN, 2 * (after - began))
        return self._ended


def _host(address: str) -> str:
    return address.rpartition(":")[0]
