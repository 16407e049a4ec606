"""Waits with a deadline: for a condition, and for a call that has no deadline of its own."""

import contextlib
import fcntl
import os
import stat
import sys
import termios
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ..threads import start_thread

__all__: list[str] = []

T = TypeVar("T")
_SHORTEST_INTERVAL, _LONGEST_INTERVAL = 0.0005, 0.1  # seconds
_GROWTH = 1.25  # of the interval: a wait takes at most this many times as long as needed


def until(done: Callable[[], object], deadline: float, awaited: str) -> None:
    """Poll ``done()`` until it returns true; after the deadline raise a TimeoutError that names what was ``awaited``.

    ``deadline`` is a time of the clock time.monotonic().
    """
    interval = _SHORTEST_INTERVAL
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no sign of {awaited}")
        time.sleep(interval)
        interval = min(_GROWTH * interval, _LONGEST_INTERVAL)


def until_output_is_read() -> None:
    """Wait until the launcher has read what this process has printed, for at most a second for each pipe.

    When a rank aborts the job, MPICH's launcher discards output that it has not read yet.
    """
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        with contextlib.suppress(Exception):  # a stream that the program has closed, for example
            stream.flush()
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                until(partial(_is_empty, descriptor), time.monotonic() + 1.0, "a reader")


def _is_empty(pipe: int) -> bool:
    return not any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))


def call_in_thread(
    call: Callable[[], T], seconds: float, discard: Callable[[T], object], check: Callable[[], object] = lambda: None
) -> T:
    """Call ``call`` on a thread of its own, and return its result or raise its error; TimeoutError after ``seconds``.

    The calling thread waits meanwhile. It handles signals, and calls ``check`` at intervals, which may raise as well.
    After a TimeoutError the call continues, and its result is passed to ``discard``.

    >>> call_in_thread(lambda: 1 + 1, 10, discard=print)
    2
    """
    results: list[T] = []
    failures: list[BaseException] = []
    guard, is_late = threading.Lock(), False  # the lock decides which side has the result

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # raised below, on the calling thread
            failures.append(error)
            return
        with guard:
            if not is_late:
                return results.append(result)
        discard(result)

    thread, deadline = start_thread("call", run), time.monotonic() + seconds
    try:
        while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            thread.join(min(left, _LONGEST_INTERVAL))
            if thread.is_alive():
                check()
    except BaseException:
        with guard:
            is_late = True
        for result in results:
            discard(result)
        raise
    with guard:
        is_late = not (results or failures)
    if failures:
        raise failures[0]
    if is_late:
        raise TimeoutError(f"no result after {seconds:g} s")
    return results[0]
