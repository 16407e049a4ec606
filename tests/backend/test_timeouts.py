"""When time is up on one host, every survivor names the rank that is late, not one that only waits for it."""

from __future__ import annotations

import functools
import os
import re
import signal
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import store
from survivors import run_ranks, run_worlds
from timeouts import CALLS, Groups, Scenario, chain, group_with_limit, named, outcomes, receive, send

import dist_prims
from dist_prims.errors import CommTimeoutError


def check(scenarios: Mapping[str, Scenario], folder: Path) -> list[str]:
    """The errors of all survivors, of which each names the late rank of its scenario."""
    texts: list[Any] = []
    for (name, scenario), found in zip(scenarios.items(), outcomes([*scenarios.values()], folder), strict=True):
        named_ranks = {rank: named(text) for rank, text in found.items()}
        assert named_ranks == {rank: [scenario.late] for rank in found}, (name, found)
        assert all(text.startswith(f"rank {rank}: ") for rank, text in found.items()), (name, found)
        texts += found.values()
    return texts


@pytest.mark.sampled(1)
@pytest.mark.parametrize("names", [[*CALLS][:5], [*CALLS][5:]], ids=["half", "other half"])
def test_a_rank_that_does_not_make_the_call_is_named(names: list[str], tmp_path: Path) -> None:
    for text in check({name: Scenario(3, 1, CALLS[name]) for name in names}, tmp_path):
        assert "has not made call number" in text


@pytest.mark.parametrize(
    "sizes", [[2, 4, 4, 2, 4, 2], pytest.param([4, 2, 2, 4, 2, 4], marks=pytest.mark.slow)], ids=["", "other sizes"]
)
def test_a_rank_that_is_stopped_is_named(sizes: list[int], tmp_path: Path) -> None:
    names = ["small", "large", "in place", "ring", "incremental", "wait with a limit"]
    scenarios = {
        f"{name} on {size} ranks": Scenario(size, size - 1, CALLS[name], is_stopped=True)
        for name, size in zip(names, sizes, strict=True)
    }
    check(scenarios, tmp_path)


@pytest.mark.parametrize("is_stopped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_late_rank_is_named_by_ranks_that_come_at_different_times(is_stopped: bool, tmp_path: Path) -> None:
    delays = [0.0, 0.5, 0.0, 0.25]
    scenarios = {
        "small": Scenario(4, 2, CALLS["small"], is_stopped, delays=delays),
        "ring": Scenario(4, 2, CALLS["ring"], not is_stopped, delays=delays),
    }
    check(scenarios, tmp_path)


def test_the_end_of_a_chain_of_receives_is_named(tmp_path: Path) -> None:
    scenarios = {
        f"{size} ranks, stopped: {is_stopped}": Scenario(
            size, size - 1, chain(size, size - 1), is_stopped, delays=[0.0, 0.45, 0.15, 0.3][:size]
        )
        for size, is_stopped in ((2, True), (3, False), (4, False), (4, True))
    }
    check(scenarios, tmp_path)


@pytest.mark.slow
def test_a_rank_that_holds_up_collectives_by_a_receive_is_not_named(tmp_path: Path) -> None:
    calls = {name: CALLS[name] for name in ("small", "ring", "in place")}
    calls["monitored_barrier"] = lambda groups: groups.world.monitored_barrier(timedelta(seconds=1))
    scenarios = {
        name: Scenario(4, 3, [call, call, receive(3), call], delays=[0.0, 0.35, 0.15, 0.0])
        for name, call in calls.items()
    }
    check(scenarios, tmp_path)


def test_the_late_rank_is_named_beside_messages(tmp_path: Path) -> None:
    def from_2(groups: Groups) -> None:
        dist.recv(torch.ones(3), 2, group=groups.ring)

    def from_any(groups: Groups) -> None:
        dist.recv(torch.ones(3), group=groups.world)

    def asynchronous(groups: Groups) -> None:
        work = dist_prims.all_reduce(torch.ones(3), group=groups.world, async_op=True)
        assert work is not None
        work.wait()

    small, ring = CALLS["small"], CALLS["ring"]
    scenarios = {
        "a receive from a rank that waits for its own call": Scenario(
            3, 2, [asynchronous, receive(0), small], delays=[0.35, 0.0, 0.0]
        ),
        "a send to a rank that waits": Scenario(3, 2, [send(1), small, small]),
        "a receive from a rank that follows a schedule": Scenario(4, 3, [from_2, ring, ring, ring]),
        "a receive from any rank": Scenario(3, 2, [from_any, small, small]),
    }
    check(scenarios, tmp_path)


def finds(rank: int, text: str) -> bool:
    return named(text) == [rank]


@pytest.mark.slow
def test_a_rank_that_computes_while_its_collective_waits_is_named(tmp_path: Path) -> None:
    """Rank 1 has begun an all_reduce that waits for rank 0, which waits for a message that rank 1 does not send: there
    is no deadlock, rank 1 is late."""

    def body(rank: int) -> str:
        group = dist.new_group(timeout=timedelta(seconds=60), backend="dist_prims")
        group.set_timeout(timedelta(seconds=1 if rank == 0 else 60))
        try:
            if rank == 1:
                work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
                store().set("begun", "")
                store().wait(["raised"], timedelta(seconds=60))
                work.wait()
            else:
                store().wait(["begun"], timedelta(seconds=60))
                try:
                    dist.recv(torch.ones(3), 1, group=group)
                finally:
                    store().set("raised", "")
        except CommTimeoutError as error:
            return str(error)
        return "no error"

    first, second = run_ranks(body, 2, tmp_path)
    assert finds(1, first), first
    assert "rank 0 has given up waiting for this rank" in second


def test_a_call_of_the_late_rank_says_that_others_have_given_up(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        group = group_with_limit(0.3)
        if rank == 1:
            store().wait(["raised"], timedelta(seconds=60))
        with pytest.raises(CommTimeoutError) as caught:
            dist.all_reduce(torch.ones(3), group=group)
        store().set("raised", "")
        return str(caught.value)

    waited, late = run_ranks(body, 2, tmp_path)
    assert "timeout after 300 ms in all_reduce" in waited
    assert "no sign of rank 1, which has not made call number 1" in waited
    assert "rank 1: rank 0 has given up waiting for this rank; create the group again before all_reduce" in late


def test_errors_of_a_sub_group_have_the_numbers_of_its_ranks(tmp_path: Path) -> None:
    def body(is_stopped: bool, rank: int) -> str:
        group = group_with_limit(1, [1, 2, 3])
        text = ""
        store().set(f"pid {rank}", str(os.getpid()))
        if rank == 3 and is_stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank in (1, 2):
            with pytest.raises(CommTimeoutError) as caught:
                dist.recv(torch.ones(3), 2, group=group) if rank == 1 else dist.all_reduce(torch.ones(9), group=group)
            text = str(caught.value)
            store().set(f"raised {rank}", "")
        store().wait(["raised 1", "raised 2"], timedelta(seconds=60))
        if rank == 0:
            os.kill(int(store().get("pid 3")), signal.SIGCONT)
        dist.barrier()
        return text

    for found in run_worlds([(functools.partial(body, is_stopped), 4) for is_stopped in (False, True)], tmp_path):
        assert finds(2, found[1]), found
        assert finds(2, found[2]), found


def receive_or_reduce(peer: int | None, group: Any) -> None:
    dist.all_reduce(torch.ones(3), group=group) if peer is None else dist.recv(torch.ones(3), peer, group=group)


@pytest.mark.slow
def test_a_rank_that_is_late_in_another_group_is_named(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 in one group, rank 1 for rank 2 in another one; rank 3 waits in the group of all."""

    def body(rank: int) -> str:
        groups = [group_with_limit(1, ranks) for ranks in ([0, 1], [1, 2], None)]
        if rank == 2:
            store().wait([f"raised {each}" for each in (0, 1, 3)], timedelta(seconds=60))
            return str(os.getpid())
        with pytest.raises(CommTimeoutError) as caught:
            receive_or_reduce(2 if rank == 1 else None, groups[[0, 1, 2, 2][rank]])
        store().set(f"raised {rank}", "")
        return str(caught.value)

    first, second, process, fourth = run_ranks(body, 4, tmp_path)
    assert f"no sign of rank in another group, process {process}" in first
    assert finds(1, second), second  # of its group
    assert finds(2, fourth), fourth


def test_a_deadlock_is_called_one(tmp_path: Path) -> None:
    """Rank 2 waits for rank 0, which waits for rank 1 in a receive; rank 1 waits for all in a collective."""

    def body(rank: int) -> str:
        group = group_with_limit(1)
        with pytest.raises(CommTimeoutError) as caught:
            receive_or_reduce(None if rank == 1 else (rank + 1) % 3, group)
        return str(caught.value)

    for text in run_ranks(body, 3, tmp_path):
        assert "deadlock, " in text
        assert re.search(r"rank 0 waits for rank 1", text)
        assert re.search(r"rank 1 waits for rank [02]", text)


def test_two_late_ranks_are_both_named(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        group = group_with_limit(1)
        if rank in (1, 3):
            store().wait(["raised 0", "raised 2"], timedelta(seconds=60))
            return ""
        with pytest.raises(CommTimeoutError) as caught:
            dist.all_reduce(torch.ones(3), group=group)
        store().set(f"raised {rank}", "")
        return str(caught.value)

    found = run_ranks(body, 4, tmp_path)
    for survivor in (0, 2):
        assert named(found[survivor]) == [1, 3]
        assert "no sign of rank 1, 3, which have not made call number 1" in found[survivor]
