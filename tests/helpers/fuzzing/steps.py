"""Steps in which no call fails: collectives, messages, shared tensors, groups that come and go, threads, callbacks."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from values import BITS, COLLECTIVES, FLOATS, REDUCING, Call, Op, content, equal

import dist_prims

from .rank import LIMIT, Failure, Group, Rank
from .script import in_own_group, step

__all__: list[str] = []

COUNTS = [0, 1, 2, 7, 100, 1000, 8_192, 8_193, 33_000, 150_000]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
PINNED = ["", "", "", "ring", "direct", "two_shot", "recursive_doubling:0-8K; ring:8K-max"]
MOST_GROUPS = 5


def draw_call(shared: Random, size: int, largest: int = COUNTS[-1]) -> dict[str, Any]:
    """The arguments of a collective, equal on all ranks."""
    name = shared.choice(list(COLLECTIVES))
    dtype = shared.choice(INTEGERS + FLOATS + [torch.complex64] + [torch.bool] * (name not in REDUCING))
    ops = [Op.SUM]
    if not dtype.is_complex:
        ops += [Op.MAX, Op.MIN] + ([Op.AVG] if dtype.is_floating_point else BITS)
    if dtype in (torch.int32, torch.int64, torch.float32, torch.float64):
        ops.append(Op.PRODUCT)
    count = shared.choice([count for count in COUNTS if count <= largest])
    numbers = {"root": shared.randrange(size), "salt": shared.randrange(11)}
    return {"name": name, "count": count, "dtype": dtype, "op": shared.choice(ops), **numbers}


@step(weight=8)
def collectives(rank: Rank, shared: Random) -> None:
    for _ in range(shared.randrange(1, 6)):
        group = shared.choice(rank.groups)
        arguments = draw_call(shared, group.size)
        if group.handle is not None:
            call = Call(**arguments, group=group.handle, place=rank.place)
            rank.launch(str(call), group, call.start, call.check)


@step(weight=4)
def messages(rank: Rank, shared: Random) -> None:
    """Messages with tags around a ring. Each rank posts them in an order of its own."""
    group, salt = shared.choice(rank.groups), shared.randrange(11)
    plan = [
        (shared.randrange(group.size), tag, shared.choice(COUNTS), shared.choice(INTEGERS + FLOATS))
        for tag in range(shared.randrange(1, 7))
    ]
    posts: list[tuple[Callable[[], Any], str, Callable[[], None]]] = []
    for shift, tag, count, dtype in plan if group.handle is not None else []:
        if shift == 0:
            continue
        to, source = (group.me + shift) % group.size, (group.me - shift) % group.size
        outgoing, expected = (content(peer, count, salt + tag, is_small=True).to(dtype) for peer in (group.me, source))
        incoming = rank.place(torch.zeros(count, dtype=dtype))
        send = partial(dist.isend, rank.place(outgoing), group=group.handle, tag=tag, group_dst=to)
        receive = partial(dist.irecv, incoming, group=group.handle, tag=tag, group_src=source)
        posts.append((send, f"send to {to}", lambda: None))
        posts.append((receive, f"recv from {source}", partial(equal, incoming, expected, "message")))
    rank.private.shuffle(posts)
    for post, what, check in posts:
        rank.keep(what, group, post(), check)


@step(weight=2)
def from_any_source(rank: Rank, shared: Random) -> None:
    """One rank receives from all others without naming them."""
    group, count, tag = shared.choice(rank.groups), shared.choice(COUNTS), 100 + shared.randrange(3)
    sink = shared.randrange(group.size)
    if group.handle is None:
        return
    if group.me != sink:
        dist.send(rank.place(content(group.me, count, tag)), group=group.handle, tag=tag, group_dst=sink)
        return
    sources = set()
    for _ in range(group.size - 1):
        tensor = rank.place(torch.zeros(count, dtype=torch.int64))
        source = group.members.index(dist.recv(tensor, group=group.handle, tag=tag))
        sources.add(source)
        equal(tensor, content(source, count, tag), f"message from any rank, here {source}")
    if len(sources) != group.size - 1:
        raise Failure(f"{group.size - 1} ranks sent one message each, and these were named: {sources}")


@step(weight=3)
def shared_tensors(rank: Rank, shared: Random) -> None:
    """all_reduce over shared tensors, which each rank makes and drops on its own."""
    group, count = shared.choice(rank.groups), shared.choice([1000, 33_000, 150_000])
    rounds, dtype, all_share = shared.randrange(1, 5), shared.choice(FLOATS), shared.random() < 0.8
    tensor = dist_prims.empty(count, dtype)

    def place(values: torch.Tensor) -> torch.Tensor:
        nonlocal tensor
        if rank.private.random() < 0.4:
            tensor = dist_prims.empty(count, dtype)
        elif rank.private.random() < 0.2 and not all_share:
            tensor = torch.empty(count, dtype=dtype)
        return tensor.copy_(values)

    for salt in range(rounds if group.handle is not None else 0):
        Call("all_reduce", count, dtype, salt=salt, group=group.handle, place=place).run()


@step(weight=2)
def incremental_sums(rank: Rank, shared: Random) -> None:
    """Sums in a shared tensor that begin before all pieces are there."""
    group, pieces, piece = shared.choice(rank.groups), shared.randrange(1, 9), shared.choice([1000, 16_384, 30_001])
    rounds, budget, dtype = shared.randrange(1, 5), shared.choice([0, 1 << 16, 1 << 30]), shared.choice(FLOATS)
    times = shared.choice([1, 1, 2])
    if group.handle is None:
        return
    tensor = dist_prims.empty(pieces * piece, dtype)
    for _ in range(times):
        incremental = group.backend.incremental_reduce(tensor, budget, None)
        for salt in range(rounds if incremental is not None else 0):  # None: too small, or a schedule is pinned
            _sum_by_pieces(rank, group, tensor, incremental, piece, salt)


def _sum_by_pieces(rank: Rank, group: Group, tensor: torch.Tensor, incremental: Any, piece: int, salt: int) -> None:
    """Each rank brings the pieces in an order of its own, and sometimes begins again."""
    call = Call("all_reduce", tensor.numel(), tensor.dtype, salt=salt, group=group.handle)
    own, order = call.data(), list(range(tensor.numel() // piece))
    rank.private.shuffle(order)
    for done, number in enumerate(order, start=1):
        rank.pause(0.0005)
        at = slice(number * piece, (number + 1) * piece)
        if not incremental.put(number, tensor[at], own[at] * 2, 0.5):
            raise Failure("put: refused although the piece lies like the tensor")
        if rank.private.random() < 0.1 and not incremental.is_shown():
            incremental.forget()
            for again in order[:done]:
                at = slice(again * piece, (again + 1) * piece)
                incremental.put(again, tensor[at], own[at].clone(), 1.0)
    incremental.all_reduce(rank.private.random() < 0.5).wait()
    equal(tensor, call.reduced(), "an incremental sum")


@step(weight=3)
def make(rank: Rank, shared: Random) -> None:
    members, pinned = rank.members(shared), shared.choice(PINNED)
    if len(members) & (len(members) - 1):
        pinned = pinned.replace("recursive_doubling:0-8K; ", "")  # for powers of two only
    if len(rank.groups) < MOST_GROUPS:
        rank.groups.append(rank.make(members, all_reduce=pinned, slot_bytes=1 << shared.choice([15, 17])))


@step(weight=2)
def destroy(rank: Rank, shared: Random) -> None:
    """Each rank destroys a group after its own calls; other ranks may still be in their last one."""
    if len(rank.groups) > 1:
        group = rank.groups.pop(shared.randrange(1, len(rank.groups)))
        rank.wait_for(group)
        rank.destroy(group)


def in_threads(*bodies: Callable[[], Any]) -> None:
    """Run each in a thread of its own, and raise the first exception."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], Any]) -> None:
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


@step(weight=2)
def threads(rank: Rank, shared: Random) -> None:
    """A thread for each group makes collectives, all at once, and several threads wait for the last one."""
    seed, count = shared.random(), shared.randrange(1, 6)
    rank.wait_for()

    def run(group: Group) -> None:
        random, own = Random(f"{seed} {group.number}"), Random(f"{seed} {group.number} {rank.number}")
        works: list[Any] = []
        calls = [Call(**draw_call(random, group.size, 33_000), group=group.handle) for _ in range(count)]
        calls.append(Call("all_reduce", 33_000, group=group.handle))
        for call in calls:
            works.append(call.start(own.random() < 0.5 or call is calls[-1]))
        in_threads(works[-1].wait, works[-1].get_future().wait, works[-1].wait)
        for call, work in zip(calls, works, strict=True):
            if work is not None:
                work.wait()
            call.check()

    in_threads(*(lambda group=group: run(group) for group in rank.groups if group.handle is not None))


class Callback:
    """An all_reduce with a callback on its future."""

    def __init__(self, rank: Rank, group: Group, count: int, then: Callable[[], Any]) -> None:
        self.over = threading.Event()
        self.error: BaseException | None = None
        self.call = Call("all_reduce", count, group=group.handle)
        rank.pause(0.003)

        def on_end(future: Any) -> None:
            try:
                future.value()
                then()
            except BaseException as error:
                self.error = error
                raise
            finally:
                self.over.set()

        self.future = self.call.start(True).get_future().then(on_end)

    def finish(self) -> None:
        if not self.over.wait(LIMIT):
            raise Failure("no callback came")
        if self.error is not None:
            raise self.error
        self.call.check()


@in_own_group(weight=2)
def callback(rank: Rank, group: Group, shared: Random) -> None:
    """The callback makes a call of its own, and may wait for it."""
    count, waits = shared.choice([10, 33_000]), shared.random() < 0.5
    inner = Call("all_reduce", count, salt=5, group=group.handle)
    works: list[Any] = []

    def then() -> None:
        works.append(inner.start(True))
        if waits:
            works[0].wait()

    Callback(rank, group, count, then).finish()
    works[0].wait()
    inner.check()


@in_own_group(weight=2)
def callback_destroys(rank: Rank, group: Group, shared: Random) -> None:
    """The callback destroys or aborts the group, and drops the last reference to it."""
    count, aborts = shared.choice([10, 33_000]), shared.random() < 0.3

    def then() -> None:
        if aborts:
            group.backend.abort()
        rank.destroy(group)
        gc.collect()

    Callback(rank, group, count, then).finish()


@in_own_group()
def garbage(rank: Rank, group: Group, shared: Random) -> None:
    """The garbage collector finds groups, calls and tensors in cycles, in the middle of other calls."""
    count = shared.choice([10, 33_000])
    thresholds = gc.get_threshold()
    gc.set_threshold(10)
    try:
        cycle: list[Any] = []
        for salt in range(3):
            call = Call("all_reduce", count, salt=salt, group=group.handle, place=rank.place)
            work = call.start(True)
            cycle.append([call, work, work.get_future(), cycle])
        cycle[-1][1].wait()  # calls of a group end in order
        for entry in cycle:
            entry[0].check()
        cycle.append(group.handle)
        rank.destroy(group)
        del cycle, call, work
    finally:
        gc.set_threshold(*thresholds)
