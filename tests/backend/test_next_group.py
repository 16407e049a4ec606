"""Fault tolerance without ``reconfigure``: ranks destroy the default group and join the next one, of other ranks.

The cases are those that PyTorch tests for backends with ``reconfigure``: ranks that leave, come back or join late,
groups that merge, and recovery after a death, an abort and a timeout. Every group meets under a prefix of one store.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from survivors import run_ranks
from values import equal, held

import dist_prims

Parts = list[list[int]]  # groups that exist at the same time, by the numbers that ranks have in the test


def join(store: Any, number: int, ranks: list[int], rank: int, timeout: float = 30) -> None:
    prefix = dist.PrefixStore(f"{number} {ranks}", store)
    seconds = timedelta(seconds=timeout)
    dist.init_process_group("dist_prims", store=prefix, rank=ranks.index(rank), world_size=len(ranks), timeout=seconds)


def check(ranks: list[int], rank: int) -> None:
    """An all_reduce, and a message from each rank to the next one."""
    position, size = ranks.index(rank), len(ranks)
    assert (dist.get_rank(), dist.get_world_size()) == (position, size)
    tensor = held(rank, 1000)
    dist.all_reduce(tensor)
    expected: Any = sum(held(each, 1000) for each in ranks)
    equal(tensor, expected, ranks)
    if size > 1:
        received = torch.empty(7, dtype=torch.int64)
        sending = dist.isend(held(rank, 7), (position + 1) % size)
        dist.recv(received, (position - 1) % size)
        sending.wait()
        equal(received, held(ranks[position - 1], 7), ranks)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "groups",
    [
        pytest.param([[[0, 1, 2]], [[0, 1]]], id="the last rank leaves"),
        pytest.param([[[0, 1, 2]], [[0, 2]]], id="the middle rank leaves"),
        pytest.param([[[0, 1, 2]], [[1, 2]]], id="rank 0 leaves"),
        pytest.param([[[0], [1], [2]], [[0, 1, 2]], [[0], [1], [2]]], id="alone, together and alone"),
        pytest.param([[[0]], [[0, 1, 2]]], id="two ranks join late"),
        pytest.param([[[0], [1, 2]], [[0, 1, 2]]], id="two groups merge"),
        pytest.param([[[0, 1, 2]], [[0, 1, 2]], [[2, 0, 1]]], id="the same ranks, and in another order"),
    ],
)
def test_ranks_leave_and_join(groups: list[Parts], tmp_path: Path) -> None:
    def body(rank: int) -> str:
        store = dist.FileStore(str(tmp_path / "store"), -1)
        for number, parts in enumerate(groups):
            for ranks in parts:
                if rank in ranks:
                    join(store, number, ranks, rank)
                    check(ranks, rank)
                    dist.destroy_process_group()
        return "done"

    assert run_ranks(body, 3, tmp_path, join=False) == ["done"] * 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", ["death", "abort", "timeout"])
def test_the_next_group_works_after_a_fault(fault: str, tmp_path: Path) -> None:
    """An error of the old group is no error of the next one, on no rank that is left."""

    def body(rank: int) -> str:
        store = dist.FileStore(str(tmp_path / "store"), -1)
        join(store, 0, [0, 1, 2], rank, timeout=1 if fault == "timeout" else 30)
        check([0, 1, 2], rank)
        if fault == "death" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        error = "none"
        try:
            if fault == "abort":
                dist.group.WORLD._get_backend(torch.device("cpu")).abort()
            if fault == "timeout" and rank == 1:  # it does not make the call, and leaves after the others' time is up
                store.wait(["late 0", "late 2"], timedelta(seconds=30))
            else:
                dist.all_reduce(torch.ones(4))
        except dist_prims.errors.CommError as caught:
            error = type(caught).__name__
            store.set(f"late {rank}", "")
        dist.destroy_process_group()
        left = [0, 2] if fault == "death" else [2, 1, 0]
        join(store, 1, left, rank)
        check(left, rank)
        dist.destroy_process_group()
        return error

    found = run_ranks(body, 3, tmp_path, join=False)
    if fault == "death":
        assert found == ["PeerDiedError", -signal.SIGKILL, "PeerDiedError"]
    elif fault == "abort":
        assert "none" not in found
    else:
        assert found == ["CommTimeoutError", "none", "CommTimeoutError"]
