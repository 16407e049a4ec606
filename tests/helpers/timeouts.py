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
from ranks import backend_of, store
from survivors import run_worlds

import dist_prims
from dist_prims.errors import CommTimeoutError

LARGE = 200_000  # elements: several segments of a slot
TIMEOUT = 1.0  # of the groups whose calls time out: the shortest that gives a diagnosis its whole time
DEADLINE = 60.0  # for survivors to raise, on a machine that is busy with other things


def group_with_limit(seconds: float, ranks: Sequence[int] | None = None, **options: Any) -> Any:
    """A group with this limit of its calls. To make it may take longer, since many ranks may do so at the same time."""
    group = dist.new_group(ranks, timeout=timedelta(seconds=DEADLINE), backend="dist_prims", **options)
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        group.set_timeout(timedelta(seconds=seconds))
    return group


@dataclass
class Groups:
    """The group of all ranks in which calls time out, and the same ranks with a pinned schedule."""

    world: Any
    ring: Any
    shared: torch.Tensor

    @staticmethod
    def make(timeout: float) -> Groups:
        ring = dist_prims.BackendOptions(all_reduce="ring")
        groups = Groups(
            group_with_limit(DEADLINE), group_with_limit(DEADLINE, pg_options=ring), dist_prims.empty(LARGE).fill_(1)
        )
        for each in (groups.world, groups.ring):
            dist.all_reduce(groups.shared, group=each)
            each.set_timeout(timedelta(seconds=timeout))
        return groups


CALLS: dict[str, Callable[[Groups], Any]] = {
    "small": lambda groups: dist.all_reduce(torch.ones(5), group=groups.world),
    "large": lambda groups: dist.all_reduce(torch.ones(LARGE), group=groups.world),
    "in place": lambda groups: dist.all_reduce(groups.shared, group=groups.world),
    "ring": lambda groups: dist.all_reduce(torch.ones(LARGE), group=groups.ring),
    "incremental": lambda groups: (
        backend_of(groups.world).incremental_reduce(groups.shared, 1 << 30, None).all_reduce(False).wait()
    ),
    "barrier": lambda groups: dist.barrier(group=groups.world),
    "all_to_all": lambda groups: dist.all_to_all_single(torch.ones(120_000), torch.ones(120_000), group=groups.world),
    "broadcast": lambda groups: dist.broadcast(torch.ones(LARGE), 0, group=groups.world),
    "wait": lambda groups: dist.all_reduce(torch.ones(5), group=groups.world, async_op=True).wait(),
    "wait with a limit": lambda groups: dist.all_reduce(torch.ones(5), group=groups.world, async_op=True).wait(
        timedelta(seconds=TIMEOUT)
    ),
}


def receive(peer: int) -> Callable[[Groups], Any]:
    return lambda groups: dist.recv(torch.ones(3), peer, group=groups.world)


def send(peer: int) -> Callable[[Groups], Any]:
    """More than the lane takes, so it waits for the receiver."""
    return lambda groups: dist.send(torch.ones(4 * LARGE), peer, group=groups.world)


@dataclass
class Scenario:
    """``calls``: one for each rank, or the same for all; the late rank makes none. A delay comes before each."""

    size: int
    late: int
    calls: Sequence[Callable[[Groups], Any]] | Callable[[Groups], Any]
    is_stopped: bool = False
    delays: Sequence[float] = ()

    def call(self, rank: int) -> Callable[[Groups], Any]:
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


def chain(size: int, late: int, last: Callable[[Groups], Any] | None = None) -> list[Callable[[Groups], Any]]:
    """Each rank receives from the next one on the way to the late rank; ``last`` is what the one before it calls."""
    calls = [receive((rank + 1) % size) for rank in range(size)]
    if last:
        calls[(late - 1) % size] = last
    return calls
