"""Checkpoints of sharded parameters, whose state_dict() only all ranks together can give.

Once it was called on rank 0 alone: MismatchError on dist_prims, a hang or SIGABRT on gloo.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dist_prims
from dist_prims.training.checkpoint import CheckpointError, Checkpoints
from dist_prims.training.sharding import ShardedParameters


def a_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


class Run:
    def __init__(self, folder: Path) -> None:
        self.model = a_model()
        self.sharded = ShardedParameters(self.model)
        self.optimizer = torch.optim.SGD(self.sharded.parameters(), lr=0.1)
        self.checkpoints = Checkpoints(folder, {"model": self.sharded})

    def whole(self) -> dict[str, Any]:
        return self.sharded.state_dict()


def train(run: Run, steps: range) -> list[float]:
    """The same batch on every rank, so the number of ranks does not count."""
    for step in steps:
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        run.optimizer.zero_grad()
        run.model(batch).square().mean().backward()
        run.optimizer.step()
    return [value for tensor in run.whole().values() for value in tensor.flatten().tolist()]


@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
def test_a_sharded_run_is_saved_and_goes_on(backend: str, tmp_path: Path) -> None:
    def first() -> list[float]:
        run = Run(tmp_path)
        train(run, range(2))
        run.checkpoints.save(2)
        return train(run, range(2, 4))

    def again() -> list[float]:
        run = Run(tmp_path)
        train(run, range(7, 8))
        assert run.checkpoints.restore() == 2
        return train(run, range(2, 4))

    wanted, *others = dist_prims.spawn(first, 2, backend=backend, timeout=60)
    assert others == [wanted]
    for size in (1, 3):
        for found in dist_prims.spawn(again, size, backend=backend, timeout=60):
            assert found == pytest.approx(wanted, rel=1e-5)


def test_a_save_that_rank_0_refuses_leaves_no_rank_in_a_collective(tmp_path: Path) -> None:
    def body() -> None:
        run = Run(tmp_path)
        train(run, range(1))
        run.checkpoints.save(5)
        with pytest.raises(CheckpointError, match="has step 5; restore"):
            Run(tmp_path).checkpoints.save(3)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 2

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)
