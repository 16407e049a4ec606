"""Polling with a deadline."""

import time
from collections.abc import Callable

__all__: list[str] = []

_SHORTEST_INTERVAL, _LONGEST_INTERVAL = 0.0001, 0.1  # seconds


def until(done: Callable[[], object], deadline: float, awaited: str) -> None:
    """Poll ``done()`` until it returns true; after the deadline raise a TimeoutError that names what was ``awaited``.

    >>> until(lambda: True, deadline=0, awaited="nothing")
    """
    interval = _SHORTEST_INTERVAL
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no sign of {awaited}")
        time.sleep(interval)
        interval = min(2 * interval, _LONGEST_INTERVAL)  # the wait takes at most twice as long as needed
