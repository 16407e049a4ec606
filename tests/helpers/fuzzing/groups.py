"""Steps that make and destroy groups, and that use groups from threads and callbacks."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.distributed as dist

import dist_prims

from .calls import content, draw_collective, same
from .rank import LIMIT, Failure, Group, Rank
from .script import step

__all__ = ["in_threads", "members_of"]

PINNED = ["", "", "", "ring", "direct", "two_shot", "recursive_doubling:0-8K; ring:8K-max"]
MOST_GROUPS = 5


def members_of(rank: Rank, shared: Random, least: int = 1) -> list[int]:
    """Some ranks of the world, for a group."""
    return sorted(shared.sample(range(rank.size), shared.randrange(min(least, rank.size), rank.size + 1)))


@step("make", weight=3)
def make(rank: Rank, shared: Random) -> None:
    members, pinned = members_of(rank, shared), shared.choice(PINNED)
    if len(members) & (len(members) - 1):
        pinned = pinned.replace("recursive_doubling:0-8K; ", "")  # for powers of two only
    if len(rank.groups) < MOST_GROUPS:
        options = dist_prims.BackendOptions(all_reduce=pinned, slot_bytes=1 << shared.choice([15, 17]))
        rank.groups.append(rank.make(members, options))


@step("destroy", weight=2)
def destroy(rank: Rank, shared: Random) -> None:
    """Each rank destroys a group after its own calls; other ranks may still be in their last one."""
    if len(rank.groups) > 1:
        group = rank.groups.pop(shared.randrange(1, len(rank.groups)))
        rank.wait_for(group)
        rank.destroy(group)


def in_threads(bodies: list[Callable[[], None]]) -> None:
    """Run each in a thread of its own, and raise the first exception."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        if thread.is_alive():
            raise Failure("a thread is not over")
    if errors:
        raise errors[0]


@step("threads", weight=2)
def threads(rank: Rank, shared: Random) -> None:
    """A thread for each group makes collectives, all at once."""
    seed, calls = shared.random(), shared.randrange(1, 6)
    rank.wait_for()

    def body(group: Group) -> Callable[[], None]:
        def run() -> None:
            random, own = Random(f"{seed} {group.number}"), Random(f"{seed} {group.number} {rank.number}")
            works = []
            for _ in range(calls):
                call = draw_collective(rank, group, random, largest=33_000)
                start, check = call.prepare()
                is_async = own.random() < 0.5
                work = start(is_async)
                works.append((work if is_async else None, check))
            for work, check in works:
                if work is not None:
                    work.wait()
                check()

        return run

    in_threads([body(group) for group in rank.groups if group.handle is not None])


@step("waiters")
def waiters(rank: Rank, shared: Random) -> None:
    """Several threads wait for one call."""
    group, count = shared.choice(rank.groups), shared.choice([100, 33_000])
    if group.handle is None:
        return
    tensor = content(group.me, count, 1)
    rank.pause(0.01)
    work = dist.all_reduce(tensor, group=group.handle, async_op=True)
    in_threads([work.wait, lambda: work.get_future().wait(), work.wait])
    same(tensor, sum_of(group, count, 1), "all_reduce with three waiters")


def sum_of(group: Group, count: int, salt: int) -> torch.Tensor:
    return torch.stack([content(member, count, salt) for member in range(group.size)]).sum(0)


class Callback:
    """An all_reduce with a callback on its future."""

    def __init__(self, rank: Rank, group: Group, count: int, salt: int, then: Callable[[], Any]) -> None:
        self.rank, self.group, self.salt = rank, group, salt
        self.tensor = content(group.me, count, salt)
        self.over, self.error = threading.Event(), None
        rank.pause(0.003)
        work = dist.all_reduce(self.tensor, group=group.handle, async_op=True)
        self.expected = sum_of(group, count, salt)

        def on_end(future: Any) -> None:
            try:
                if future is not None:
                    future.value()
                then()
            except BaseException as error:
                self.error = error
                raise
            finally:
                self.over.set()

        self.future = work.get_future().then(on_end)

    def finish(self) -> None:
        if not self.over.wait(LIMIT):
            raise Failure("no callback came")
        if self.error is not None:
            raise self.error
        same(self.tensor, self.expected, "all_reduce with a callback")


@step("callback", weight=2)
def callback(rank: Rank, shared: Random) -> None:
    """The callback makes a call of its own, on the same group or on another, and may wait for it."""
    members = members_of(rank, shared, least=2)
    count, on_the_same, waits = shared.choice([10, 33_000]), shared.random() < 0.5, shared.random() < 0.5
    group, other = rank.make(members), rank.make(members)
    if group.handle is not None:
        inner, works = content(group.me, count, 5), []

        def then() -> None:
            handle = (group if on_the_same else other).handle
            works.append(dist.all_reduce(inner, group=handle, async_op=True))
            if waits:
                works[0].wait()

        call = Callback(rank, group, count, 4, then)
        call.finish()
        works[0].wait()
        same(inner, sum_of(group, count, 5), "all_reduce made by a callback")
    rank.destroy(group)
    rank.destroy(other)


@step("callback-raises")
def callback_raises(rank: Rank, shared: Random) -> None:
    group, count = shared.choice(rank.groups), shared.choice([10, 33_000])
    if group.handle is None:
        return

    def then() -> None:
        raise LookupError("the callback's own")

    call = Callback(rank, group, count, 4, then)
    rank.fails("the callback's future", call.finish, LookupError)
    rank.fails("the callback's future", call.future.wait, RuntimeError, LookupError)
    same(call.tensor, call.expected, "all_reduce whose callback raises")


@step("callback-destroys", weight=2)
def callback_destroys(rank: Rank, shared: Random) -> None:
    """The callback destroys or aborts the group, and drops the last reference to it."""
    members, count = members_of(rank, shared, least=2), shared.choice([10, 33_000])
    aborts = shared.random() < 0.3
    group = rank.make(members)
    if group.handle is None:
        return

    def then() -> None:
        if aborts:
            group.backend.abort()
        rank.destroy(group)
        gc.collect()

    Callback(rank, group, count, 4, then).finish()


@step("garbage")
def garbage(rank: Rank, shared: Random) -> None:
    """The garbage collector finds groups, calls and tensors in cycles, in the middle of other calls."""
    members, count = members_of(rank, shared, least=2), shared.choice([10, 33_000])
    group = rank.make(members)
    thresholds = gc.get_threshold()
    gc.set_threshold(10)
    try:
        if group.handle is not None:
            cycle: list[Any] = []
            for salt in range(3):
                tensor = rank.place(content(group.me, count, salt))
                work = dist.all_reduce(tensor, group=group.handle, async_op=True)
                cycle.append([tensor, work, work.get_future(), cycle])
            cycle[-1][1].wait()  # calls of a group end in order
            for salt, entry in enumerate(cycle):
                same(entry[0], sum_of(group, count, salt), "all_reduce in a cycle")
            cycle.append(group.handle)
            rank.destroy(group)
            del cycle, tensor, work
    finally:
        gc.set_threshold(*thresholds)
