"""One queue for each group: its collectives one after the other, in the order of the calls, on this rank as on all.

A synchronous call on an idle queue runs where it is called. An asynchronous one is handed to the queue's thread, so that
it overlaps with what the caller computes; a synchronous call behind it waits its turn, since two collectives of one
group that overtook each other on one rank would pair the wrong messages.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

__all__ = ["CollectiveQueue", "Work", "queue_of"]


class Work:
    """A collective that was started with ``async_op=True``."""

    def __init__(self, future: Future[None], what: str) -> None:
        self._future = future
        self._what = what

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the result is there; raise what went wrong, or TimeoutError."""
        try:
            self._future.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError as error:
            if self._future.done():
                raise
            raise TimeoutError(f"{self._what} was not done within {timeout}") from error
        return True


class CollectiveQueue:
    """Numbers the collectives of one group and runs them in order."""

    def __init__(self) -> None:
        self._inside: set[int] = set()  # threads in run() or start()
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._called = 0
        self._done = 0
        self._jobs: queue.SimpleQueue[_Job | None] | None = None

    @contextmanager
    def _entered(self, what: str) -> Iterator[None]:
        """A signal handler or finalizer that interrupts a call cannot make another: that would wait for this one."""
        me = threading.get_ident()
        if me in self._inside:
            raise RuntimeError(
                f"{what}: a signal handler or a finalizer makes this call inside another collective of the same group "
                "on the same thread, so it can never begin; set a flag there, and make the call after the other one"
            )
        self._inside.add(me)
        try:
            yield
        finally:
            self._inside.discard(me)

    def run(self, job: Callable[[int], None], what: str) -> None:
        """Run job(number of the call) here, when all earlier calls are done."""
        with self._entered(what):
            with self._lock:
                number = self._called
                self._called += 1
            self._run_in_turn(number, job)

    def start(self, job: Callable[[int], None], what: str) -> Work:
        """Run job(number of the call) on the queue's thread, when all earlier calls are done."""
        future: Future[None] = Future()
        with self._entered(what), self._lock:
            if self._jobs is None:
                self._jobs = queue.SimpleQueue()
                threading.Thread(target=_serve, args=(self._jobs,), daemon=True, name="dist_prims queue").start()
            self._jobs.put(_Job(partial(self._run_on_thread, self._called, job, what), future))
            self._called += 1
        return Work(future, what)

    def _run_on_thread(self, number: int, job: Callable[[int], None], what: str) -> None:
        with self._entered(what):
            self._run_in_turn(number, job)

    def _run_in_turn(self, number: int, job: Callable[[int], None]) -> None:
        try:
            with self._turn:
                self._turn.wait_for(lambda: self._done == number)
        except BaseException:  # of a signal handler; the calls behind this one must not wait for it
            threading.Thread(target=self._run_in_turn, args=(number, lambda _: None), daemon=True).start()
            raise
        try:
            job(number)
        finally:
            with self._turn:
                self._done += 1
                self._turn.notify_all()

    def __del__(self) -> None:
        if self._jobs is not None:
            self._jobs.put(None)  # the group is gone, and its thread goes too


@dataclass(frozen=True)
class _Job:
    run: Callable[[], None]  # keeps the queue alive as long as there is work on it
    future: Future[None]


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while job := jobs.get():
        try:
            with torch.no_grad():
                job.run()
        except BaseException as error:  # whatever it is, the caller of wait() is to get it
            job.future.set_exception(error)
        else:
            job.future.set_result(None)
        del job  # not until the next one comes


_queues: weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveQueue] = weakref.WeakKeyDictionary()
_queues_lock = threading.RLock()  # a finalizer may come here while its thread is here


def queue_of(group: dist.ProcessGroup) -> CollectiveQueue:
    with _queues_lock:
        return _queues.setdefault(group, CollectiveQueue())
