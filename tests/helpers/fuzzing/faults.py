"""Steps in which a call must fail. The error comes before the deadline, and nothing is written after it.

A step after which a group cannot go on makes a group of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Any

import torch
import torch.distributed as dist

import dist_prims
from dist_prims.errors import CommError, CommTimeoutError, MismatchError

from .calls import content, same
from .groups import members_of
from .rank import LIMIT, Failure, Group, Rank
from .script import step

__all__: list[str] = []

Op = dist.ReduceOp


def set_timeout(group: Group, seconds: float) -> None:
    group.backend.set_timeout(timedelta(seconds=seconds))


@step("mismatch", weight=2)
def mismatch(rank: Rank, shared: Random) -> None:
    """One rank makes another call than the rest. All raise, no data is touched, and the group goes on."""
    group, how = shared.choice(rank.groups), shared.choice(["count", "dtype", "op", "collective", "root"])
    odd, count = shared.randrange(group.size), shared.choice([10, 33_000])
    if group.handle is None or group.size == 1:
        return
    is_odd = group.me == odd
    tensor = rank.place(content(group.me, count + 1, 3, torch.float32))
    given = tensor if how == "count" and is_odd else tensor[:count]
    if how == "dtype" and is_odd:
        given = given.to(torch.int32)
    before = given.clone()
    is_async = rank.private.random() < 0.5

    def call() -> None:
        if how == "root" or (how == "collective" and is_odd):
            work = dist.broadcast(given, group=group.handle, group_src=(0, 1)[is_odd], async_op=is_async)
        else:
            op = Op.MAX if how == "op" and is_odd else Op.SUM
            work = dist.all_reduce(given, op, group.handle, async_op=is_async)
        if work is not None:
            work.wait()

    error = rank.fails(f"mismatch of {how}", call, MismatchError)
    if "rank" not in str(error).lower():
        raise Failure(f"the error names no rank: {error}")
    same(given, before, "data of a call that ranks disagreed on")


@step("mismatched-message")
def mismatched_message(rank: Rank, shared: Random) -> None:
    """A message is longer or shorter than the tensor for it. The receiver raises, and the group goes on."""
    group, count = shared.choice(rank.groups), shared.choice([10, 33_000])
    wrong = count + shared.choice([-1, 1])
    if group.handle is None or group.size == 1 or group.me > 1:
        return
    if group.me == 0:
        dist.send(content(0, wrong, 0), group=group.handle, group_dst=1, tag=7)
        return
    work: Any = dist.irecv(torch.zeros(count, dtype=torch.int64), group=group.handle, group_src=0, tag=7)
    rank.fails("a message of another length", work.wait, MismatchError)


@step("bad-receive")
def bad_receive(rank: Rank, shared: Random) -> None:
    """The message cannot be copied into the receiver's tensor. The receive raises, and the group goes on."""
    group, how = shared.choice(rank.groups), shared.choice(["expanded", "inference"])
    if group.handle is None or group.size == 1 or group.me > 1:
        return
    if group.me == 0:
        dist.send(torch.ones(4), group=group.handle, group_dst=1, tag=8)
        return

    def receive() -> None:
        if how == "expanded":
            tensor = torch.zeros(1).expand(4)
        else:
            with torch.inference_mode():
                tensor = torch.zeros(2, 2).t()
        work: Any = dist.irecv(tensor, group=group.handle, group_src=0, tag=8)
        received.append(True)
        rank.until(work.is_completed, "a receive that no thread waits for")
        work.wait()

    received: list[bool] = []
    rank.fails(f"a receive into a tensor that is {how}", receive, RuntimeError, ValueError)
    if not received:  # refused at once: the message is still there
        dist.recv(torch.zeros(4), group=group.handle, group_src=0, tag=8)


@step("timeout", weight=2)
def timeout(rank: Rank, shared: Random) -> None:
    """One rank calls too late. The others' calls end in time, and nothing is written afterwards."""
    members = members_of(rank, shared, least=2)
    late, count = shared.randrange(len(members)), shared.choice([10, 33_000, 150_000])
    lends, pinned, by_wait = shared.random() < 0.5, shared.random() < 0.3, shared.random() < 0.5
    options = dist_prims.BackendOptions(all_reduce="ring" if pinned else "", slot_bytes=1 << 16)
    group = rank.make(members, options)
    if group.handle is None:
        return
    tensor = dist_prims.empty(count) if lends and "shared" not in rank.without else torch.empty(count)
    tensor.fill_(1)
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
    rank.destroy(group)


@step("late-receive")
def late_receive(rank: Rank, shared: Random) -> None:
    """No message comes for a receive. Its wait times out, and the group ends on all ranks."""
    members, count = members_of(rank, shared, least=2), shared.choice([10, 33_000])
    group = rank.make(members)
    if group.handle is None:
        return
    dist.barrier(group.handle)
    tensor = torch.zeros(count)
    if group.me == 0:
        work: Any = dist.irecv(tensor, group=group.handle, group_src=1)
        error = rank.fails("a receive", lambda: work.wait(timedelta(milliseconds=100)), CommTimeoutError)
        if "recv" not in str(error):
            raise Failure(f"the error does not say what was waited for: {error}")
        rank.freeze("a receive that timed out", tensor)
    else:
        call_until_error(rank, group, lambda: dist.all_reduce(tensor, group=group.handle))
        rank.freeze("a call in a group that ended", tensor)
    rank.destroy(group)


def call_until_error(
    rank: Rank, group: Group, call: Callable[[], Any], kind: type[BaseException] = RuntimeError
) -> BaseException:
    """Repeat the call until it fails because another rank ends the group."""
    limit = time.monotonic() + LIMIT
    while True:
        try:
            call()
        except kind as error:
            rank.trace(f"group {group.number} has ended: {type(error).__name__}: {str(error)[:200]}")
            return error
        if time.monotonic() > limit:
            raise Failure(f"group {group.number} has ended elsewhere, and this rank does not notice")


@step("abort", weight=3)
def abort(rank: Rank, shared: Random) -> None:
    """Threads of one rank abort the group while it is in use, at the same time as each other and as destroy."""
    members, count = members_of(rank, shared, least=2), shared.choice([10, 33_000, 150_000])
    breaker, threads = shared.randrange(len(members)), shared.randrange(1, 4)
    pinned, sends = shared.random() < 0.3, shared.random() < 0.4
    group = rank.make(members, dist_prims.BackendOptions(all_reduce="ring" if pinned else "", slot_bytes=1 << 16))
    if group.handle is None:
        return
    tensor, received = rank.place(content(group.me, count, 0)), torch.zeros(count, dtype=torch.int64)
    works: list[Any] = []

    def call() -> None:
        if sends and len(works) < 3:
            works.append(dist.irecv(received, group=group.handle, group_src=(group.me + 1) % group.size, tag=9))
        if rank.private.random() < 0.5:
            works.append(dist.all_reduce(tensor.clone(), group=group.handle, async_op=True))
        else:
            dist.all_reduce(tensor.clone(), group=group.handle)

    backend, beside = group.backend, rank.private.random() < 0.5

    def breaks() -> None:
        time.sleep(0.02 * rank.private.random())
        backend.abort()

    others = []
    if group.me == breaker:
        others = [threading.Thread(target=breaks, daemon=True) for _ in range(threads)]
    for other in others:
        other.start()
    call_until_error(rank, group, call)
    if beside:
        rank.destroy(group)
    for other in others:
        other.join(LIMIT)
        if other.is_alive():
            raise Failure("abort does not return")
    finish_all(works)
    rank.freeze("an abort", received)
    rank.destroy(group)


def finish_all(works: list[Any]) -> None:
    """Each call ends, with or without an error."""
    for work in works:
        with contextlib.suppress(RuntimeError):
            work.wait()
        if not work.is_completed():
            raise Failure("a call whose wait has returned is not completed")


@step("leave", weight=2)
def leave(rank: Rank, shared: Random) -> None:
    """One rank destroys the group with calls under way. The other ranks' calls fail."""
    members, count = members_of(rank, shared, least=2), shared.choice([10, 33_000, 150_000])
    leaver, calls, lends = shared.randrange(len(members)), shared.randrange(0, 4), shared.random() < 0.5
    group = rank.make(members)
    if group.handle is None:
        return
    lends = lends and "shared" not in rank.without
    tensors = [dist_prims.empty(count) if lends else torch.empty(count) for _ in range(calls)]
    works = [dist.all_reduce(tensor.fill_(1), group=group.handle, async_op=True) for tensor in tensors]
    rank.pause(0.005)
    if group.me == leaver:
        if rank.private.random() < 0.3 and works:
            works[0].wait()
        rank.destroy(group)
        finish_all(works)
    else:
        call_until_error(rank, group, lambda: dist.all_reduce(torch.ones(count), group=group.handle))
        finish_all(works)
        rank.destroy(group)
    for tensor in tensors:
        rank.freeze("the end of its group", tensor)


class Alarm(Exception):
    """The exception of a signal handler."""


@step("interrupt")
def interrupt(rank: Rank, shared: Random) -> None:
    """A signal handler raises in a wait. The exception leaves the call, and the group ends on all ranks."""
    members, count = members_of(rank, shared, least=2), shared.choice([10, 33_000])
    one, pinned = shared.randrange(len(members)), shared.random() < 0.3
    group = rank.make(members, dist_prims.BackendOptions(all_reduce="ring" if pinned else "", slot_bytes=1 << 16))
    if group.handle is None:
        return
    tensor = torch.ones(count)
    dist.all_reduce(tensor, group=group.handle)
    if group.me == one:
        try:
            run_with_signal(rank, signal.SIGUSR1, _raise, lambda: _all_reduce_for_long(group, tensor))
            raise Failure("the handler's exception did not come")
        except Alarm:
            pass
    else:
        rank.pause(0.05)
        time.sleep(0.2)
        call_until_error(rank, group, lambda: dist.all_reduce(tensor, group=group.handle))
    rank.freeze("a call that a signal interrupted", tensor)
    rank.destroy(group)


def _raise(*_: object) -> None:
    raise Alarm


def _all_reduce_for_long(group: Group, tensor: torch.Tensor) -> None:
    for _ in range(1000):
        dist.all_reduce(tensor, group=group.handle)
        time.sleep(0.01)


def run_with_signal(rank: Rank, number: int, handler: Callable[..., Any], body: Callable[[], Any]) -> None:
    """Run the body. A thread sends the signal to this process a moment later."""
    before = signal.signal(number, handler)

    def send() -> None:
        time.sleep(0.03 + 0.05 * rank.private.random())
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send, daemon=True)
    try:
        sender.start()
        body()
    finally:
        sender.join(LIMIT)
        signal.signal(number, before)


@step("handler", weight=2)
def handler(rank: Rank, shared: Random) -> None:
    """A signal handler that runs inside a wait makes a call itself, or destroys the group."""
    members, count = members_of(rank, shared, least=2), shared.choice([10, 33_000])
    does, one = shared.choice(["call", "message", "destroy", "abort"]), shared.randrange(len(members))
    group = rank.make(members)
    if group.handle is None:
        return
    tensor, ran = torch.ones(count), []

    def in_handler(*_: object) -> None:
        try:
            if does == "call":
                dist.all_reduce(torch.ones(3), group=group.handle)
            elif does == "message":
                dist.isend(torch.ones(3), group=group.handle, group_dst=(group.me + 1) % group.size)
            elif does == "destroy":
                rank.destroy(group)
            else:
                group.backend.abort()
        except RuntimeError as error:
            rank.trace(f"the handler's {does}: {type(error).__name__}: {str(error)[:200]}")
        ran.append(does)

    if group.me == one:
        run_with_signal(rank, signal.SIGUSR2, in_handler, lambda: _some_calls(group, tensor))
        rank.until(lambda: bool(ran), "the handler")
    else:
        time.sleep(0.1)
        with contextlib.suppress(RuntimeError):
            _some_calls(group, tensor)
    rank.destroy(group)


def _some_calls(group: Group, tensor: torch.Tensor) -> None:
    with contextlib.suppress(RuntimeError, ValueError):  # the second: torch, of a destroyed group
        for _ in range(3):
            if group.handle is not None:
                dist.all_reduce(tensor, group=group.handle)


@step("stop")
def stop(rank: Rank, shared: Random) -> None:
    """A rank is stopped in the middle of a call, and continues after the others have timed out."""
    members, stopped = members_of(rank, shared, least=2), shared.random()
    count, lends = shared.choice([150_000, 3_000_000]), shared.random() < 0.7 and "shared" not in rank.without
    group = rank.make(members)
    if group.handle is None:
        return
    tensor = dist_prims.empty(count) if lends else torch.empty(count)
    tensor.fill_(1)
    dist.all_reduce(tensor, group=group.handle)
    set_timeout(group, 0.3)
    is_stopped = group.me == int(stopped * group.size)
    stopper = _stop_soon(0.01 * rank.private.random(), 1.0) if is_stopped else None
    call_until_error(rank, group, lambda: dist.all_reduce(tensor, group=group.handle))
    rank.freeze("a call that timed out because a rank was stopped", tensor)
    if stopper:
        stopper.wait(LIMIT)
    else:
        time.sleep(1)
    rank.check_frozen()
    rank.destroy(group)


def _stop_soon(after: float, seconds: float) -> subprocess.Popen[bytes]:
    """Start a process that stops this one and lets it continue."""
    me = os.getpid()
    script = f"sleep {after:.3f}; kill -STOP {me}; sleep {seconds}; kill -CONT {me}"
    return subprocess.Popen(["/bin/sh", "-c", script], env={})
