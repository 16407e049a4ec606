"""Steps in which a call must fail, signals, forks, and the ways in which a round ends.

The error comes before the deadline, and nothing is written after it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from values import content, equal

from dist_prims.errors import CommError, MismatchError, PeerDiedError, PeerLeftError
from dist_prims.rendezvous.deadline import until

from .rank import LIMIT, Failure, Group, Rank
from .script import ending, in_own_group, step

__all__: list[str] = []

Op = dist.ReduceOp
# Between fork() and exec() a child of AddressSanitizer's may inherit a lock of its allocator from a call under way.
WAITS_BEFORE_FORK = "asan" in os.environ.get("LD_PRELOAD", "")


def set_timeout(group: Group, seconds: float) -> None:
    group.backend.set_timeout(timedelta(seconds=seconds))


@step(weight=2)
def mismatch(rank: Rank, shared: Random) -> None:
    """One rank makes another call than the rest. All raise, no data is touched, and the group goes on."""
    group, how = shared.choice(rank.groups), shared.choice(["count", "dtype", "op", "collective", "root"])
    odd, count = shared.randrange(group.size), shared.choice([10, 33_000])
    if group.handle is None or group.size == 1:
        return
    is_odd = group.me == odd
    tensor = rank.place(content(group.me, count + 1).float())
    tensor = tensor if how == "count" and is_odd else tensor[:count]
    if how == "dtype" and is_odd:
        tensor = tensor.to(torch.int32)
    before = tensor.clone()
    is_async = rank.private.random() < 0.5

    def call() -> None:
        if how == "root" or (how == "collective" and is_odd):
            work = dist.broadcast(tensor, group=group.handle, group_src=(0, 1)[is_odd], async_op=is_async)
        else:
            op = Op.MAX if how == "op" and is_odd else Op.SUM
            work = dist.all_reduce(tensor, op, group.handle, async_op=is_async)
        if work is not None:
            work.wait()

    error = rank.fails(f"mismatch of {how}", call, MismatchError)
    if "rank" not in str(error).lower():
        raise Failure(f"the error names no rank: {error}")
    equal(tensor, before, "data of a call that ranks disagreed on")


@in_own_group(weight=2)
def timeout(rank: Rank, group: Group, shared: Random) -> None:
    """One rank calls too late. The others' calls end in time, and nothing is written afterwards."""
    late, count = shared.randrange(group.size), shared.choice([10, 33_000, 150_000])
    is_shared, by_wait = shared.random() < 0.5, shared.random() < 0.5
    tensor = rank.ones(count, is_shared)
    dist.all_reduce(tensor, group=group.handle)
    if not by_wait:
        set_timeout(group, 0.2)
    store, gave_up = dist.distributed_c10d._get_default_store(), f"gave up {group.number}"
    if group.me == late:
        store.wait([gave_up], timedelta(seconds=LIMIT))
    else:
        rank.pause(0.05)
    if by_wait:
        work: Any = dist.all_reduce(tensor, group=group.handle, async_op=True)
        rank.fails("a wait with a limit", lambda: work.wait(timedelta(milliseconds=200)), CommError)
        rank.fails("another wait", work.wait, CommError)
    else:
        rank.fails("a call that one rank is late for", lambda: dist.all_reduce(tensor, group=group.handle), CommError)
    store.set(gave_up, "")
    rank.freeze("a call that timed out", tensor)
    rank.fails("a call after the end", lambda: dist.all_reduce(torch.ones(3), group=group.handle), RuntimeError)


def finish_all(works: list[Any]) -> None:
    """Each call ends, with or without an error."""
    for work in works:
        with contextlib.suppress(RuntimeError):
            work.wait()
        if not work.is_completed():
            raise Failure("a call whose wait has returned is not completed")


@in_own_group(weight=3)
def abort(rank: Rank, group: Group, shared: Random) -> None:
    """Threads of one rank abort the group while it is in use, at the same time as each other and as destroy."""
    breaker, threads = shared.randrange(group.size), shared.randrange(1, 4)
    count, sends = shared.choice([10, 33_000, 150_000]), shared.random() < 0.4
    tensor, received = rank.place(content(group.me, count)), torch.zeros(count, dtype=torch.int64)
    handle, backend, works = group.handle, group.backend, list[Any]()

    def call() -> None:
        if sends and len(works) < 3:
            works.append(dist.irecv(received, group=handle, group_src=(group.me + 1) % group.size, tag=9))
        if rank.private.random() < 0.5:
            works.append(dist.all_reduce(tensor.clone(), group=handle, async_op=True))
        else:
            dist.all_reduce(tensor.clone(), group=handle)

    def abort_soon() -> None:
        time.sleep(0.02 * rank.private.random())
        backend.abort()

    aborting = [threading.Thread(target=abort_soon, daemon=True) for _ in range(threads * (group.me == breaker))]
    for thread in aborting:
        thread.start()
    rank.fails_soon(group, call)
    if rank.private.random() < 0.5:
        rank.destroy(group)
    for thread in aborting:
        thread.join(LIMIT)
        if thread.is_alive():
            raise Failure("abort does not return")
    finish_all(works)
    rank.freeze("an abort", received)


@in_own_group(weight=2)
def leave(rank: Rank, group: Group, shared: Random) -> None:
    """One rank destroys the group with calls under way. The other ranks' calls fail."""
    count, leaver, calls = shared.choice([10, 33_000, 150_000]), shared.randrange(group.size), shared.randrange(4)
    is_shared = shared.random() < 0.5
    tensors = [rank.ones(count, is_shared) for _ in range(calls)]
    works = [dist.all_reduce(tensor, group=group.handle, async_op=True) for tensor in tensors]
    rank.pause(0.005)
    if group.me == leaver:
        if rank.private.random() < 0.3 and works:
            works[0].wait()
        rank.destroy(group)
    else:
        rank.fails_soon(group, lambda: dist.all_reduce(torch.ones(count), group=group.handle))
    finish_all(works)
    rank.destroy(group)
    for tensor in tensors:
        rank.freeze("the end of its group", tensor)


@contextlib.contextmanager
def signal_soon(rank: Rank, handler: Callable[..., Any]) -> Any:
    """A thread sends a signal, for which the process has this handler, a moment later."""
    before = signal.signal(signal.SIGUSR1, handler)
    sender = threading.Timer(0.03 + 0.05 * rank.private.random(), os.kill, (os.getpid(), signal.SIGUSR1))
    sender.start()
    try:
        yield
    finally:
        sender.join(LIMIT)
        signal.signal(signal.SIGUSR1, before)


@in_own_group()
def interrupt(rank: Rank, group: Group, shared: Random) -> None:
    """A signal handler raises in a wait. The exception leaves the call, and the group ends on all ranks."""
    interrupted, tensor = shared.randrange(group.size), torch.ones(shared.choice([10, 33_000]))
    dist.all_reduce(tensor, group=group.handle)

    def raise_error(*_: object) -> None:
        raise LookupError("the handler's own")

    def call() -> None:
        dist.all_reduce(tensor, group=group.handle)
        time.sleep(0.01)

    if group.me == interrupted:
        with signal_soon(rank, raise_error):
            rank.fails_soon(group, call, LookupError)
    else:
        time.sleep(0.2)
        rank.fails_soon(group, call)
    rank.freeze("a call that a signal interrupted", tensor)


@in_own_group(weight=2)
def handler(rank: Rank, group: Group, shared: Random) -> None:
    """A signal handler that runs inside a wait makes a call itself, or destroys the group."""
    does, one = shared.choice(["call", "message", "destroy", "abort"]), shared.randrange(group.size)
    tensor, ran = torch.ones(shared.choice([10, 33_000])), threading.Event()

    def in_handler(*_: object) -> None:
        actions: dict[str, Callable[[], Any]] = {
            "call": lambda: dist.all_reduce(torch.ones(3), group=group.handle),
            "message": lambda: dist.isend(torch.ones(3), group=group.handle, group_dst=(group.me + 1) % group.size),
            "destroy": lambda: rank.destroy(group),
            "abort": lambda: group.backend.abort(),
        }
        with contextlib.suppress(RuntimeError):
            actions[does]()
        ran.set()

    def some_calls() -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # the second: torch, of a destroyed group
            for _ in range(3):
                if group.handle is not None:
                    dist.all_reduce(tensor, group=group.handle)

    if group.me == one:
        with signal_soon(rank, in_handler):
            some_calls()
        rank.until(ran.is_set, "the handler")
    else:
        time.sleep(0.1)
        some_calls()


@step(weight=2)
def signals(rank: Rank, shared: Random) -> None:
    """Start, change or stop a timer whose signal has a handler in Python."""
    interval = rank.private.choice([0, 0.001, 0.005, 0.02])
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, interval, interval)


@step(weight=2)
def fork(rank: Rank, shared: Random) -> None:
    """A child inherits groups and calls under way. It cannot use them, and its end disturbs no rank."""
    if WAITS_BEFORE_FORK:
        rank.wait_for()
    how = rank.private.choice(["exits", "collects", "calls"])
    rank.trace(f"a child that {how}")
    if (child := os.fork()) == 0:
        _run_child(rank, how)
    ended = list[int]()

    def has_ended() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended.extend([os.waitstatus_to_exitcode(status)] if pid else [])
        return bool(pid)

    try:
        until(has_ended, time.monotonic() + LIMIT, f"the end of a child that {how}")
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
    if ended != [0]:
        raise Failure(f"a child that {how} ended with status {ended}")


def _run_child(rank: Rank, how: str) -> NoReturn:
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


@ending(weight=3)
def orderly(rank: Rank, shared: Random) -> None:
    """All ranks wait for all calls, and leave."""


@ending()
def unwaited(rank: Rank, shared: Random) -> None:
    """All ranks leave with collectives under way."""
    dist.barrier()
    for _ in range(shared.randrange(1, 4)):
        dist.all_reduce(torch.ones(shared.choice([10, 33_000])), async_op=True)


@ending(weight=2)
def killed(rank: Rank, shared: Random) -> None:
    """A rank is killed while the group is in use. The error on every other rank names it."""
    _lose(rank, shared, lambda: os.kill(os.getpid(), signal.SIGKILL), PeerDiedError)


@ending()
def exits(rank: Rank, shared: Random) -> None:
    """A rank exits without destroying its groups."""
    _lose(rank, shared, lambda: os._exit(0), PeerDiedError)


@ending()
def leaves(rank: Rank, shared: Random) -> None:
    """A rank destroys its groups while the others still use them."""
    _lose(rank, shared, lambda: None, PeerLeftError)


@ending()
def killed_in_make(rank: Rank, shared: Random) -> None:
    """A rank is killed while the others make a group with it."""
    lost, after = shared.randrange(rank.size), 0.05 * shared.random()
    dist.barrier()
    if rank.number == lost:
        threading.Timer(after, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        while True:
            rank.destroy(rank.make(list(range(rank.size))))
    with contextlib.suppress(TimeoutError):  # the store's, which no rank can end
        rank.fails_soon(rank.groups[0], lambda: rank.destroy(rank.make(list(range(rank.size)), timeout=5)))


def _lose(rank: Rank, shared: Random, end: Callable[[], None], kind: type[Exception]) -> None:
    lost, count = shared.randrange(rank.size), shared.choice([10, 33_000, 150_000])
    if rank.number == lost:
        dist.all_reduce(torch.ones(count))
        rank.pause(0.01)
        end()
        return
    error = rank.fails_soon(rank.groups[0], lambda: dist.all_reduce(torch.ones(count)), kind)
    if f"rank {lost}" not in str(error):
        raise Failure(f"rank {lost} was lost, and the error is: {error}")
