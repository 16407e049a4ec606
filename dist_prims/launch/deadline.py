"""Wait for something that can only be asked for, and not for ever."""

import time
from collections.abc import Callable

__all__ = ["until"]

_FIRST_NAP, _LONGEST_NAP = 0.0001, 0.1


def until(done: Callable[[], object], deadline: float, awaited: str) -> None:
    """Return when ``done()`` is true; a TimeoutError names what was ``awaited``.

    >>> until(lambda: True, deadline=0, awaited="nothing")
    """
    nap = _FIRST_NAP
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no sign of {awaited}")
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP)  # never more than double the wait that was needed
