"""Ranks that wait for one that is late until their time is up: what do the survivors' errors say?

A scenario has one late rank, which is stopped or sleeps, and a call for every other rank. Where a rank waits for a rank
that is itself blocked, the late rank is the end of that chain.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import store
from survivors import run_worlds

import dist_prims
from dist_prims.errors import CommTimeoutError

LARGE = 200_000  # elements: several segments of a slot
TIMEOUT = 1.0  # of the groups whose calls time out: the shortest that gives a diagnosis its whole time
DEADLINE = 60.0  # for survivors to raise, on a machine that is busy with other things


@dataclass
class Groups:
    """The group of all ranks in which calls time out, and the same ranks with a pinned schedule."""

    world: Any
    ring: Any
    shared: torch.Tensor

    @staticmethod
    def make(timeout: float) -> Groups:
        limit = timedelta(seconds=timeout)
        ring = dist_prims.BackendOptions(all_reduce="ring")
        groups = Groups(
            dist.new_group(timeout=limit, backend="dist_prims"),
            dist.new_group(timeout=limit, backend="dist_prims", pg_options=ring),
            dist_prims.empty(LARGE).fill_(1),
        )
        for each in (groups.world, groups.ring):
            dist.all_reduce(groups.shared, group=each)
        return groups


def small(groups: Groups) -> None:
    dist.all_reduce(torch.ones(5), group=groups.world)


def large(groups: Groups) -> None:
    dist.all_reduce(torch.ones(LARGE), group=groups.world)


def in_place(groups: Groups) -> None:
    dist.all_reduce(groups.shared, group=groups.world)


def ring(groups: Groups) -> None:
    dist.all_reduce(torch.ones(LARGE), group=groups.ring)


def incremental(groups: Groups) -> None:
    backend: Any = groups.world._get_backend(torch.device("cpu"))
    backend.incremental_reduce(groups.shared, 1 << 30, None).all_reduce(False).wait()


def barrier(groups: Groups) -> None:
    dist.barrier(group=groups.world)


def all_to_all(groups: Groups) -> None:
    size = dist.get_world_size()
    outputs = [torch.ones(LARGE // 10) for _ in range(size)]
    dist.all_to_all(outputs, [torch.ones(LARGE // 10) for _ in range(size)], group=groups.world)


def broadcast(groups: Groups) -> None:
    dist.broadcast(torch.ones(LARGE), 0, group=groups.world)


def wait_without_limit(groups: Groups) -> None:
    dist.all_reduce(torch.ones(5), group=groups.world, async_op=True).wait()


def wait_with_limit(groups: Groups) -> None:
    dist.all_reduce(torch.ones(5), group=groups.world, async_op=True).wait(timedelta(seconds=TIMEOUT))


def monitored_barrier(groups: Groups) -> None:
    groups.world.monitored_barrier(timedelta(seconds=TIMEOUT))


COLLECTIVES = [small, large, in_place, ring, incremental, barrier, all_to_all, broadcast]
COLLECTIVES += [wait_without_limit, wait_with_limit]


def receive(peer: int) -> Callable[[Groups], None]:
    def call(groups: Groups) -> None:
        dist.recv(torch.ones(3), peer, group=groups.world)

    return call


def send(peer: int) -> Callable[[Groups], None]:
    """More than the lane takes, so it waits for the receiver."""

    def call(groups: Groups) -> None:
        dist.send(torch.ones(4 * LARGE), peer, group=groups.world)

    return call


@dataclass
class Scenario:
    """``calls``: one for each rank, or the same for all; the late rank makes none. A delay comes before each."""

    size: int
    late: int
    calls: Sequence[Callable[[Groups], None]] | Callable[[Groups], None]
    is_stopped: bool = False
    delays: Sequence[float] = ()

    def call(self, rank: int) -> Callable[[Groups], None]:
        return self.calls if callable(self.calls) else self.calls[rank]


def outcomes(scenarios: Sequence[Scenario], folder: Path) -> list[dict[int, str]]:
    """What the error of each survivor says, for scenarios that run at the same time on ranks of their own."""
    worlds = [(functools.partial(take_part, scenario), scenario.size) for scenario in scenarios]
    found = run_worlds(worlds, folder)
    return [
        {rank: str(text) for rank, text in enumerate(texts) if rank != scenario.late}
        for scenario, texts in zip(scenarios, found, strict=True)
    ]


def take_part(scenario: Scenario, rank: int) -> str:
    groups = Groups.make(TIMEOUT)
    pids: list[Any] = [None] * scenario.size
    dist.all_gather_object(pids, os.getpid())
    if rank == scenario.late:
        return be_late(scenario)
    time.sleep(scenario.delays[rank] if scenario.delays else 0)
    try:
        scenario.call(rank)(groups)
        return "no error"
    except CommTimeoutError as error:
        return str(error)
    finally:
        store().add("raised", 1)
        await_survivors(scenario.size - 1)
        if scenario.is_stopped:
            os.kill(pids[scenario.late], signal.SIGCONT)


def await_survivors(count: int) -> None:
    deadline = time.monotonic() + DEADLINE
    while store().add("raised", 0) < count:
        assert time.monotonic() < deadline, "a survivor has not raised"
        time.sleep(0.05)


def be_late(scenario: Scenario) -> str:
    if scenario.is_stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    await_survivors(scenario.size - 1)
    return "late"


NAMED = [
    r"no sign of rank ([\d, ]+)(?!.*no sign of)",  # the last one: before it, monitored_barrier lists those that wait
    r"rank (\d+) has given up waiting",
    r"timeout after .*(?:from|to) rank (\d+)",
]


def named(text: str) -> list[int]:
    """The ranks that an error blames."""
    for pattern in NAMED:
        if found := re.search(pattern, text):
            return [int(each) for each in found[1].replace(" ", "").split(",") if each]
    return []


def chain(size: int, late: int, last: Callable[[Groups], None] | None = None) -> list[Callable[[Groups], None]]:
    """Each rank receives from the next one on the way to the late rank; ``last`` is what the one before it calls."""
    calls = [receive((rank + 1) % size) for rank in range(size)]
    if last:
        calls[(late - 1) % size] = last
    return calls
