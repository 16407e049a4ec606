"""Queue of the collectives of a group: it runs them one at a time, in the order of the calls.

A synchronous call runs in the calling thread, after all earlier calls of the group. An asynchronous call runs in the
thread of the queue, so that it overlaps with computation of the caller. If two collectives of one group changed their
order on one rank, a message of one collective would be received by the other.
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
from typing import Any

import torch
import torch.distributed as dist

from ..threads import start_thread
from ..tracing.session import begin_trace_of_environment

__all__: list[str] = []


class Work(dist.Work):
    """An asynchronous collective. ``future`` completes when the result is in the tensors of the user.

    ``what`` names the collective in errors. ``inner`` is the work of the backend, if a backend executes the collective:
    its wait shows the other ranks for which ranks this rank waits.
    """

    def __init__(self, future: Future[None], what: str, inner: dist.Work | None = None) -> None:
        super().__init__()
        self._future = future
        self._what = what
        self._inner = inner

    def is_completed(self) -> bool:
        """Whether the collective has ended, with or without an error."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether the collective has ended without an error."""
        return self._future.done() and self._future.exception() is None

    def exception(self) -> Any:
        """The error of a collective that has ended, or None."""
        return self._future.exception() if self._future.done() else None

    def synchronize(self) -> None:
        """Wait for the result."""
        self.wait()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result and return True; raise the error of the collective.

        After the ``timeout`` raise TimeoutError, which does not end the collective. Without one, or with zero as in
        torch, the wait ends with the collective, by the timeout of the group at the latest.
        """
        if self._inner is not None and not timeout:  # a timeout of the backend's own wait would end the group
            self._inner.wait()
        try:
            self._future.result(timeout.total_seconds() if timeout else None)
        except TimeoutError as error:
            if self._future.done():
                raise
            raise TimeoutError(f"{self._what} did not complete within {timeout}") from error
        return True


class CollectiveQueue:
    """Numbers the collectives of one group and runs them in order."""

    def __init__(self) -> None:
        self._calling: set[int] = set()  # ids of the threads in run() or start()
        self._lock = threading.Lock()  # of the counters
        self._turn = threading.Condition(self._lock)  # notified when a call has ended
        self._called = 0  # calls so far: the number of the last one
        self._done = 0  # the number of the last call that has ended
        self._jobs: queue.SimpleQueue[_Job | None] | None = None

    @contextmanager
    def _guard_reentry(self, what: str) -> Iterator[None]:
        """Raise RuntimeError for a call within a call: a signal handler would wait for the call that it interrupts."""
        me = threading.get_ident()
        if me in self._calling:
            raise RuntimeError(
                f"{what}: a signal handler or a finalizer makes this call inside another collective of the same group "
                "on the same thread, so it can never begin; set a flag there, and make the call after the other one"
            )
        self._calling.add(me)
        try:
            yield
        finally:
            self._calling.discard(me)

    def run(self, job: Callable[[int], None], what: str) -> None:
        """Run job(number of the call) in this thread, after all earlier calls. The first call has the number 1."""
        with self._guard_reentry(what):
            with self._lock:
                self._called += 1
                number = self._called
            self._run_in_order(number, job)

    def start(self, job: Callable[[int], None], what: str) -> Work:
        """Run job(number of the call) in the queue's thread, after all earlier calls."""
        future: Future[None] = Future()
        with self._guard_reentry(what), self._lock:
            if self._jobs is None:
                jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
                start_thread("queue", _run_jobs, jobs)
                self._jobs = jobs  # only after the thread has started: without it a later call would hang
            self._called += 1
            self._jobs.put(_Job(partial(self._run_on_thread, self._called, job, what), future))
        return Work(future, what)

    def _run_on_thread(self, number: int, job: Callable[[int], None], what: str) -> None:
        with self._guard_reentry(what):
            self._run_in_order(number, job)

    def _run_in_order(self, number: int, job: Callable[[int], None]) -> None:
        """Run a job when all calls with lower numbers have ended."""
        try:
            with self._turn:
                self._turn.wait_for(lambda: self._done == number - 1)
        except BaseException:  # a signal handler has raised: a thread takes this call's turn, so that later calls run
            start_thread("turn", self._run_in_order, number, lambda _: None)
            raise
        try:
            job(number)
        finally:
            with self._turn:
                self._done += 1
                self._turn.notify_all()

    def __del__(self) -> None:
        if self._jobs is not None:
            self._jobs.put(None)  # ends the thread of the queue


@dataclass(frozen=True)
class _Job:
    run: Callable[[], None]  # refers to the queue, and keeps it alive
    future: Future[None]


def _run_jobs(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while job := jobs.get():
        try:
            with torch.no_grad():
                job.run()
        except BaseException as error:  # every exception is for the caller of wait()
            job.future.set_exception(error)
        else:
            job.future.set_result(None)
        del job  # drop the reference before the wait for the next job


_queues: weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveQueue] = weakref.WeakKeyDictionary()
_queues_lock = threading.RLock()  # reentrant: a finalizer may call queue_of() within queue_of()


def queue_of(group: dist.ProcessGroup) -> CollectiveQueue:
    """Return the queue of a group."""
    begin_trace_of_environment()
    with _queues_lock:
        return _queues.setdefault(group, CollectiveQueue())
