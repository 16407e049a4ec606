"""Threads and processes that cannot start: the error was "can't start new thread", without rank, thread or remedy."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import dist_prims
from dist_prims.threads import start_thread


@contextmanager
def no_thread_starts() -> Iterator[None]:
    """Context in which no thread of Python can start: a stack does not fit into the address space."""
    before = threading.stack_size(1 << 47)
    try:
        yield
    finally:
        threading.stack_size(before)


def test_the_error_has_the_thread_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    expected = r"rank 3: the thread 'dist_prims of a test' cannot start .*`ulimit -u`, now .*pids.max"
    with no_thread_starts(), pytest.raises(RuntimeError, match=expected):
        start_thread("of a test", print)


def test_a_queue_without_a_thread_takes_no_job() -> None:
    """The next call waited without end, because the queue was taken for one that has a thread."""

    def body() -> list[float]:
        data = torch.ones(2)
        with (
            no_thread_starts(),
            pytest.raises(RuntimeError, match=r"rank [01]: the thread 'dist_prims queue' cannot start"),
        ):
            dist_prims.all_reduce(data, algorithm="ring", async_op=True)
        work = dist_prims.all_reduce(data, algorithm="ring", async_op=True)
        assert work is not None
        work.wait()
        assert dist.get_world_size() == 2
        return data.tolist()

    assert dist_prims.spawn(body, 2, backend="gloo", timeout=60) == [[2, 2], [2, 2]]


def test_a_rank_whose_process_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fork() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", no_fork)
    with pytest.raises(RuntimeError, match=r"spawn: rank 0: its process cannot start \(Resource .*ulimit -u"):
        dist_prims.spawn(dist.get_rank, 2, timeout=60)
