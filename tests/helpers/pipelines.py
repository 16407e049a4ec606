"""What the tests of pipelines share: stages, a batch, and the unsplit model that they must equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from dist_prims.collectives.flat import split_evenly
from dist_prims.schedules.pipelines import PipelinePlan

BACKENDS = ["gloo", "dist_prims"]


def stages_of(count: int) -> list[nn.Module]:
    """Stages that begin with what works in place, hold convolutions, and one that learns nothing."""
    torch.manual_seed(0)
    made: list[nn.Module] = []
    for stage in range(count):
        conv = nn.Conv2d(2, 2, 3, padding=1, bias=stage % 2 == 0)
        made.append(nn.Sequential(nn.LeakyReLU(0.1, inplace=stage > 0), conv, nn.Linear(4, 4)))
    made[count // 2].requires_grad_(count == 1)
    return made


def a_batch(count: int = 11, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(count)
    return torch.randn(count, 2, 4, size), torch.randn(count, 2, 4, size)


def backward_order(plan: PipelinePlan) -> list[int]:
    return [action.micro for action in plan.actions[0] if action.stage == 0 and action.kind in ("B", "BW")]


def unsplit(
    stages: Sequence[nn.Module],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    num_microbatches: int,
    order: Sequence[int],
) -> torch.Tensor:
    """One rank, one model, the same micro-batches."""
    lengths = split_evenly(len(inputs), num_microbatches)
    xs, ts = inputs.split(lengths), targets.split(lengths)
    losses = {}
    for micro in order:
        loss = F.mse_loss(nn.Sequential(*stages)(xs[micro]), ts[micro]) * (lengths[micro] / len(inputs))
        loss.backward()
        losses[micro] = loss.detach().double()
    return torch.stack([losses[micro] for micro in range(num_microbatches)]).sum()


def compare(own: Mapping[int, nn.Module], whole: Iterable[nn.Module], exact: bool) -> None:
    stages = list(whole)
    for number, module in own.items():
        for (name, mine), its in zip(module.named_parameters(), stages[number].parameters(), strict=True):
            if its.grad is None:
                assert mine.grad is None, (number, name)
                continue
            rtol, atol = (0.0, 0.0) if exact else (1e-5, 1e-6)
            torch.testing.assert_close(mine.grad, its.grad, rtol=rtol, atol=atol, msg=f"stage {number}: {name}")


def normed(count: int) -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4)) for _ in range(count)]
