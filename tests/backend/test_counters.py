"""Counters of the backend near their ends: docs/design/long_life.md lists all of them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import backend_of
from survivors import run_ranks

import dist_prims
from dist_prims.errors import CommTimeoutError, MismatchError

NEAR_THE_END = 2**64 - 3


def ring(tensor: torch.Tensor) -> torch.Tensor:
    """What the rank before has sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = torch.zeros_like(tensor)
    works = [dist.isend(tensor, (rank + 1) % size), dist.irecv(found, (rank - 1) % size)]
    for work in works:
        work.wait()
    return found


@pytest.mark.parametrize("hosts", ["aaa", "aab"])
def test_numbers_of_calls_messages_and_incremental_sums_wrap(
    hosts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results are right before and after the wrap, and a mismatch after it is reported."""

    def body(rank: int) -> Any:
        monkeypatch.setenv("DIST_PRIMS_HOST_ID", hosts[rank])
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        dist.init_process_group("dist_prims", init_method=f"file://{tmp_path}/store", rank=rank, world_size=3)
        backend_of().number_from(NEAR_THE_END)
        for turn in range(6):
            total = torch.ones(5)
            dist.all_reduce(total)
            assert total.eq(3).all()
            assert ring(torch.tensor([rank, turn])).tolist() == [(rank - 1) % 3, turn]
            if hosts == "aaa":
                shared = dist_prims.empty(20_000).fill_(rank)
                incremental = backend_of().incremental_reduce(shared, 1 << 20, None)
                for expected in (0 + 1 + 2, 3 * 3):  # the second sum is that of the first results
                    incremental.all_reduce(False).wait()
                    assert shared.eq(expected).all()
        with pytest.raises(MismatchError, match="all_reduce"):
            dist.broadcast(torch.ones(1), 0) if rank == 1 else dist.all_reduce(torch.ones(1))
        return float(total[0])

    assert run_ranks(body, 3, tmp_path, join=False) == [3.0] * 3


@pytest.mark.slow
def test_numbers_of_wait_for_graphs_wrap(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 in one group, rank 1 for rank 2 in another one, and rank 2 for both in the group of all.
    Each wait is published in the graphs of all groups of its process."""

    def body(rank: int) -> str:
        backend_of().number_from(NEAR_THE_END)
        limit, text = timedelta(seconds=1), ""
        members = [ranks for _ in range(3) for ranks in ([0, 1], [1, 2])]
        groups = [dist.new_group(ranks, timeout=limit, backend="dist_prims") for ranks in members]
        for first, second in zip(groups[::2], groups[1::2], strict=True):
            if rank < 2:
                with pytest.raises(CommTimeoutError) as caught:
                    dist.all_reduce(torch.ones(3), group=first) if rank == 0 else dist.recv(torch.ones(3), 2, second)
                text += str(caught.value)
            dist.barrier()
        return text

    text, *_ = run_ranks(body, 3, tmp_path)
    assert text.count("deadlock, rank 1 waits for rank 0, rank 0 waits for rank 1") == 3, text
