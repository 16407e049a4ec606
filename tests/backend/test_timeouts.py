"""When time is up on one host, every survivor names the rank that is late, not one that only waits for it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from survivors import run_ranks
from timeouts import (
    COLLECTIVES,
    Groups,
    Scenario,
    chain,
    in_place,
    incremental,
    large,
    monitored_barrier,
    named,
    outcomes,
    receive,
    ring,
    send,
    small,
    wait_with_limit,
)

from dist_prims.errors import CommTimeoutError


def check(scenario: Scenario, folder: Path) -> list[str]:
    found = outcomes(scenario, folder)
    assert {rank: named(text) for rank, text in found.items()} == {rank: [scenario.late] for rank in found}, found
    assert all(text.startswith(f"rank {rank}: ") for rank, text in found.items())
    return list(found.values())


@pytest.mark.parametrize("call", COLLECTIVES)
def test_a_rank_that_does_not_make_the_call(call: Callable[[Groups], None], tmp_path: Path) -> None:
    for text in check(Scenario(3, 1, call), tmp_path):
        assert "has not made call number" in text


@pytest.mark.parametrize("call", [small, large, in_place, ring, incremental, wait_with_limit])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_is_stopped(call: Callable[[Groups], None], size: int, tmp_path: Path) -> None:
    check(Scenario(size, size - 1, call, is_stopped=True), tmp_path)


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("call", [small, ring])
def test_ranks_that_come_at_different_times(call: Callable[[Groups], None], is_stopped: bool, tmp_path: Path) -> None:
    check(Scenario(4, 2, call, is_stopped, delays=[0.0, 1.0, 0.0, 0.5]), tmp_path)


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_chain_of_receives(size: int, is_stopped: bool, tmp_path: Path) -> None:
    check(Scenario(size, size - 1, chain(size, size - 1), is_stopped, delays=[0.0, 0.9, 0.3, 0.6][:size]), tmp_path)


@pytest.mark.parametrize("call", [small, ring, in_place, monitored_barrier])
def test_collectives_held_up_by_a_rank_that_receives(call: Callable[[Groups], None], tmp_path: Path) -> None:
    check(Scenario(4, 3, [call, call, receive(3), call], delays=[0.0, 0.7, 0.3, 0.0]), tmp_path)


def test_a_send_to_a_rank_that_waits(tmp_path: Path) -> None:
    check(Scenario(3, 2, [send(1), small, small]), tmp_path)


def test_a_receive_from_a_rank_that_follows_a_schedule(tmp_path: Path) -> None:
    def from_2(groups: Groups) -> None:
        dist.recv(torch.ones(3), 2, group=groups.ring)

    check(Scenario(4, 3, [from_2, ring, ring, ring]), tmp_path)


def test_a_receive_from_any_rank(tmp_path: Path) -> None:
    def from_any(groups: Groups) -> None:
        dist.recv(torch.ones(3), group=groups.world)

    check(Scenario(3, 2, [from_any, small, small]), tmp_path)


def finds(rank: int, text: str) -> bool:
    return named(text) == [rank]


def test_a_rank_that_computes_while_its_collective_waits(tmp_path: Path) -> None:
    """Rank 1 has begun an all_reduce that waits for rank 0, which waits for a message that rank 1 does not send: there
    is no deadlock, rank 1 is late."""

    def body(rank: int) -> str:
        limit = timedelta(seconds=2 if rank == 0 else 60)
        group = dist.new_group(timeout=timedelta(seconds=60), backend="dist_prims")
        group.set_timeout(limit)
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True) if rank == 1 else None
        try:
            if work:
                time.sleep(4)
                work.wait()
            else:
                dist.recv(torch.ones(3), 1, group=group)
        except CommTimeoutError as error:
            return str(error)
        return "no error"

    first, second = run_ranks(body, 2, tmp_path)
    assert finds(1, first), first
    assert "rank 0 has given up waiting for this rank" in second


def test_the_late_rank_is_told(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        group = dist.new_group(timeout=timedelta(seconds=1), backend="dist_prims")
        time.sleep(3 * rank)
        with pytest.raises(CommTimeoutError) as caught:
            dist.all_reduce(torch.ones(3), group=group)
        return str(caught.value)

    waited, late = run_ranks(body, 2, tmp_path)
    assert "timeout after 1000 ms in all_reduce" in waited
    assert "no sign of rank 1, which has not made call number 1" in waited
    assert "rank 1: rank 0 has given up waiting for this rank; create the group again before all_reduce" in late


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_sub_group(is_stopped: bool, tmp_path: Path) -> None:
    """Ranks are called by their numbers in the group."""

    def body(rank: int) -> str:
        group = dist.new_group([1, 2, 3], timeout=timedelta(seconds=2), backend="dist_prims")
        store, texts = dist.distributed_c10d._get_default_store(), ""
        store.set(f"pid {rank}", str(os.getpid()))
        if rank == 3 and is_stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank in (1, 2):
            with pytest.raises(CommTimeoutError) as caught:
                dist.recv(torch.ones(3), 2, group=group) if rank == 1 else dist.all_reduce(torch.ones(9), group=group)
            texts = str(caught.value)
            store.set(f"raised {rank}", "")
        store.wait(["raised 1", "raised 2"], timedelta(seconds=60))
        if rank == 0:
            os.kill(int(store.get("pid 3")), signal.SIGCONT)
        dist.barrier()
        return texts

    found = run_ranks(body, 4, tmp_path)
    assert finds(2, found[1]), found
    assert finds(2, found[2]), found


def receive_or_reduce(peer: int | None, group: Any) -> None:
    dist.all_reduce(torch.ones(3), group=group) if peer is None else dist.recv(torch.ones(3), peer, group=group)


def test_a_rank_that_is_blocked_in_another_group(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 in one group, rank 1 for rank 2 in another one; rank 3 waits in the group of all."""

    def body(rank: int) -> str:
        limit = timedelta(seconds=2)
        groups = [dist.new_group(ranks, timeout=limit, backend="dist_prims") for ranks in ([0, 1], [1, 2], None)]
        store = dist.distributed_c10d._get_default_store()
        if rank == 2:
            store.wait([f"raised {each}" for each in (0, 1, 3)], timedelta(seconds=60))
            return str(os.getpid())
        with pytest.raises(CommTimeoutError) as caught:
            receive_or_reduce(2 if rank == 1 else None, groups[[0, 1, 2, 2][rank]])
        store.set(f"raised {rank}", "")
        return str(caught.value)

    first, second, process, fourth = run_ranks(body, 4, tmp_path)
    assert f"no sign of rank in another group, process {process}" in first
    assert finds(1, second), second  # of its group
    assert finds(2, fourth), fourth


def test_a_deadlock_is_called_one(tmp_path: Path) -> None:
    """Rank 2 waits for rank 0, which waits for rank 1 in a receive; rank 1 waits for all in a collective."""

    def body(rank: int) -> str:
        group = dist.new_group(timeout=timedelta(seconds=1), backend="dist_prims")
        with pytest.raises(CommTimeoutError) as caught:
            receive_or_reduce(None if rank == 1 else (rank + 1) % 3, group)
        return str(caught.value)

    for text in run_ranks(body, 3, tmp_path):
        assert "deadlock, " in text
        assert re.search(r"rank 0 waits for rank 1", text)
        assert re.search(r"rank 1 waits for rank [02]", text)


def test_two_late_ranks_are_both_named(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        group = dist.new_group(timeout=timedelta(seconds=1), backend="dist_prims")
        store = dist.distributed_c10d._get_default_store()
        if rank in (1, 3):
            store.wait(["raised 0", "raised 2"], timedelta(seconds=60))
            return ""
        with pytest.raises(CommTimeoutError) as caught:
            dist.all_reduce(torch.ones(3), group=group)
        store.set(f"raised {rank}", "")
        return str(caught.value)

    found = run_ranks(body, 4, tmp_path)
    for survivor in (0, 2):
        assert named(found[survivor]) == [1, 3]
        assert "no sign of rank 1, 3, which have not made call number 1" in found[survivor]
