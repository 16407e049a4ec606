"""Steps that concern the whole process, signals and forks, and the ways in which a round ends."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from random import Random
from typing import NoReturn

import torch
import torch.distributed as dist

from dist_prims.errors import PeerDiedError, PeerLeftError

from .faults import call_until_error
from .rank import LIMIT, Failure, Rank
from .script import ending, step

__all__: list[str] = []


@step("signals", weight=2)
def signals(rank: Rank, shared: Random) -> None:
    """Start, change or stop a timer whose signal has a handler in Python."""
    rank.timer(rank.private.choice([0, 0.001, 0.005, 0.02]))


@step("fork", weight=2)
def fork(rank: Rank, shared: Random) -> None:
    """A child inherits groups and calls under way. It cannot use them, and its end disturbs no rank."""
    if rank.private.random() < 0.3:
        return
    if rank.waits_before_fork:
        rank.wait_for()
    how = rank.private.choice(["exits", "collects", "calls"])
    rank.trace(f"a child that {how}")
    pid = os.fork()
    if pid == 0:
        _child(rank, how)
    limit = time.monotonic() + LIMIT
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            break
        if time.monotonic() > limit:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise Failure(f"a child that {how} does not end")
        time.sleep(0.002)
    if status != 0:
        raise Failure(f"a child that {how} ended with status {status}")


def _child(rank: Rank, how: str) -> NoReturn:
    status = 1
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if how == "collects":
            rank.pending.clear()
            rank.groups.clear()
            rank.frozen.clear()
            gc.collect()
        elif how == "calls":
            rank.fails("a call in a child", lambda: dist.all_reduce(torch.ones(3)), RuntimeError)
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


@ending("orderly", weight=3)
def orderly(rank: Rank, shared: Random) -> None:
    """All ranks wait for all calls, and leave."""
    rank.wait_for()


@ending("unwaited")
def unwaited(rank: Rank, shared: Random) -> None:
    """All ranks leave with collectives under way."""
    rank.wait_for()
    dist.barrier()
    for _ in range(shared.randrange(1, 4)):
        dist.all_reduce(torch.ones(shared.choice([10, 33_000])), async_op=True)


@ending("killed", weight=2)
def killed(rank: Rank, shared: Random) -> None:
    """A rank is killed while the group is in use. The error on every other rank names it."""
    _lose(rank, shared, lambda: os.kill(os.getpid(), signal.SIGKILL), PeerDiedError)


@ending("exits")
def exits(rank: Rank, shared: Random) -> None:
    """A rank exits without destroying its groups."""
    _lose(rank, shared, lambda: os._exit(0), PeerDiedError)


@ending("leaves")
def leaves(rank: Rank, shared: Random) -> None:
    """A rank destroys its groups while the others still use them."""
    _lose(rank, shared, lambda: None, PeerLeftError)


@ending("dies-in-make")
def dies_in_make(rank: Rank, shared: Random) -> None:
    """A rank is killed while the others make a group with it."""
    lost, after = shared.randrange(rank.size), 0.05 * shared.random()
    rank.wait_for()
    dist.barrier()
    if rank.number == lost:
        killer = threading.Timer(after, lambda: os.kill(os.getpid(), signal.SIGKILL))
        killer.start()
        while True:
            rank.destroy(rank.make(list(range(rank.size))))
    with contextlib.suppress(TimeoutError):  # the store's, which no rank can end
        call_until_error(rank, rank.groups[0], lambda: rank.destroy(rank.make(list(range(rank.size)), timeout=5)))


def _lose(rank: Rank, shared: Random, end: Callable[[], None], kind: type[Exception]) -> None:
    lost, count = shared.randrange(rank.size), shared.choice([10, 33_000, 150_000])
    rank.wait_for()
    if rank.number == lost:
        dist.all_reduce(torch.ones(count))
        rank.pause(0.01)
        end()
        return
    error = call_until_error(rank, rank.groups[0], lambda: dist.all_reduce(torch.ones(count)), kind)
    if f"rank {lost}" not in str(error):
        raise Failure(f"rank {lost} was lost, and the error is: {error}")
