"""Which processes have ended, wherever they run: nothing listens at their addresses any more."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ..rendezvous.served import refused

__all__: list[str] = []

_BETWEEN, _PROBE_TIME = 0.1, 0.1  # seconds


class ProcessProbe:
    """Connects at intervals to addresses at which processes listen while they run: :mod:`dist_prims.rendezvous.served`.

    ``first`` is the time in seconds until the first probe.

    >>> probe = ProcessProbe(["127.0.0.1:1"], first=0)
    >>> probe.ended([0])
    {0}
    """

    def __init__(self, addresses: Sequence[str], first: float) -> None:
        self._addresses = addresses
        self._next = time.monotonic() + first
        self._ended: set[int] = set()

    def ended(self, watched: Iterable[int]) -> set[int]:
        """Return the positions of the addresses whose processes have ended; a probe asks the watched ones only."""
        began = time.monotonic()
        if began >= self._next:
            left = [each for each in watched if each not in self._ended]
            gone = refused({self._addresses[each] for each in left}, _PROBE_TIME)
            self._ended |= {each for each in left if self._addresses[each] in gone}
            after = time.monotonic()
            self._next = after + max(_BETWEEN, 2 * (after - began))
        return self._ended
