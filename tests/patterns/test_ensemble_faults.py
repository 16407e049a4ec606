"""Per-sample gradients: what once gave a wrong answer, or left the other ranks waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import dist_prims
from dist_prims.errors import MismatchError
from dist_prims.patterns.per_sample import PerSampleGradients, over_pool


class Tenfold(TensorDataset):
    def __getitem__(self, number: int) -> Any:
        return tuple(each[number] * 10 for each in self.tensors)


def test_pools_of_ones_own_and_of_several_inputs() -> None:
    def body() -> None:
        assert over_pool(lambda x: x, Tenfold(torch.arange(4.0))).gather().tolist() == [0, 10, 20, 30]
        items = [((torch.full((3,), float(at)), torch.ones(4)), torch.tensor(1.0)) for at in range(4)]
        torch.manual_seed(0)
        samples = PerSampleGradients(
            nn.Bilinear(3, 4, 2), lambda output, y: (output.sum() - y.sum()).square(), method="loop"
        )
        xs, ys = torch.arange(4.0)[:, None].expand(4, 3), torch.ones(4)
        torch.testing.assert_close(over_pool(samples.norms, items).gather(), samples.norms((xs, torch.ones(4, 4)), ys))
        rank = dist.get_rank()
        rows = over_pool(lambda x: {"b": x, "a": x} if rank else {"a": x, "b": x}, TensorDataset(torch.arange(4.0)))
        assert [*rows.gather()] == ["a", "b"]

    dist_prims.spawn(body, 2, timeout=60)


def test_a_pool_that_fails_on_one_rank_fails_on_all() -> None:
    def body() -> None:
        one, pool = dist.get_rank() == 1, TensorDataset(torch.arange(6.0))
        own = MismatchError if not one else (ValueError, TypeError, RuntimeError)
        with pytest.raises(own, match=r"has no len\(\)"):
            over_pool(lambda x: x, iter([1]) if one else pool)
        with pytest.raises(own, match="abacus"):
            over_pool(lambda x: x, pool, device="abacus" if one else "cpu")
        with pytest.raises(ValueError, match="returned an empty dictionary"):
            over_pool(lambda x: {}, pool)
        rows = over_pool(lambda x: x, pool)
        with pytest.raises(own, match="k=-1 must be 0 or more"):
            rows.top(-1 if one else 1)
        assert rows.top(1)[0].tolist() == [5.0]

    dist_prims.spawn(body, 2, timeout=60)


class Mixed(nn.Module):
    """One weight, used by a layer that is known and as one that is not, after the same dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.known, self.unknown = nn.Linear(4, 3, bias=False), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, 0.5, True)
        found: torch.Tensor = self.known(x) + x @ self.unknown.T
        return found


def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.sum() - target.sum()).square()


@pytest.mark.parametrize("method", ["trick", "vmap", "loop"])
def test_all_gradients_of_a_sample_are_of_one_dropout(method: str) -> None:
    torch.manual_seed(0)
    found = PerSampleGradients(Mixed(), total, method=method).gradients(torch.randn(9, 4), torch.randn(9))
    torch.testing.assert_close(found["known.weight"], found["unknown"])


@pytest.mark.parametrize("method", ["trick", "vmap", "loop"])
def test_what_has_no_gradient_or_no_samples(method: str) -> None:
    class Detached(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).detach()

    assert PerSampleGradients(Detached(4, 3), total, method=method).norms(torch.ones(2, 4), torch.ones(2)).tolist() == [
        0,
        0,
    ]
    samples = PerSampleGradients(nn.Linear(4, 3).double(), total, method=method)
    for count in (0, 2):
        rows = samples.norms_and_losses(torch.ones(count, 4).double(), torch.ones(count).double())
        assert {name: each.dtype for name, each in rows.items()} == {"norms": torch.float64, "losses": torch.float64}


def test_names_of_parameters() -> None:
    tied = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    tied[1].weight = tied[0].weight
    assert PerSampleGradients(tied, total, "1.weight").names == ["0.weight"]
    assert PerSampleGradients(tied, total, "1").names == ["0.weight", "1.bias"]
    with pytest.raises(ValueError, match=r"of=\[\] chooses no parameter"):
        PerSampleGradients(tied, total, [])
    half = nn.Linear(4, 3)
    half.weight = nn.Parameter(half.weight.to(torch.complex64))
    with pytest.raises(ValueError, match=r"'weight' is torch.complex64; the gradients of complex parameters"):
        PerSampleGradients(half, total)
    assert PerSampleGradients(half, total, "bias").names == ["bias"]
