"""Ensembles and per-sample gradients: what once gave a wrong answer, or left the other ranks waiting."""

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
from dist_prims.patterns.ensemble import DistributedEnsemble
from dist_prims.patterns.per_sample import PerSampleGradients, over_pool


def net(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


class Scaled(nn.Module):
    """What no parameter says: a number, a function, a tensor that is no buffer."""

    def __init__(self, factor: float = 1.0, act: Any = torch.tanh, mask: float = 1.0) -> None:
        super().__init__()
        self.layer, self.name = nn.Linear(3, 2), f"{factor} {act} {mask}"
        self.factor, self.act, self.mask = factor, act, torch.full((2,), mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.act(self.layer(x)) * self.factor * self.mask
        return found


def encoder(activation: str) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, activation=activation)


@pytest.mark.parametrize("size", [1, 2])
def test_members_whose_attributes_differ_are_refused(size: int) -> None:
    def body() -> None:
        for first, second, words in (
            (nn.MultiheadAttention(4, 1), nn.MultiheadAttention(4, 2), "head_dim=4, .* head_dim=2"),
            (nn.MultiheadAttention(4, 1), nn.MultiheadAttention(4, 1, dropout=0.5), r"dropout=0\.0, .* dropout=0\.5"),
            (encoder("relu"), encoder("gelu"), "activation"),
            (Scaled(), Scaled(2.0), r"layer '' Scaled with factor=1\.0, member 1 has .* factor=2\.0"),
            (Scaled(), Scaled(act=torch.relu), r"act=_?.*tanh, .* act=.*relu"),
            (Scaled(), Scaled(mask=2.0), r"mask=torch\.float32 of shape \(2,\), values"),
        ):
            with pytest.raises(ValueError if size == 1 else MismatchError, match=words):
                DistributedEnsemble([first, second])
        plain = Scaled()
        plain.name = "text may differ"
        assert DistributedEnsemble([Scaled(), plain]).count == 2

    dist_prims.spawn(body, size, timeout=60)


class Uncertain(nn.Module):
    """Dropout that stays on when the model is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, True) * self.scale


@pytest.mark.parametrize("size", [1, 2])
def test_dropout_of_evaluated_members_differs(size: int) -> None:
    def body() -> float:
        ensemble = DistributedEnsemble([Uncertain().eval() for _ in range(2)]).eval()
        torch.manual_seed(7)  # alike on every rank
        masks = ensemble.outputs(torch.ones(400)) != 0
        assert 0.3 < (masks[0] == masks[1]).float().mean() < 0.7
        return torch.rand(()).item()

    assert len({*dist_prims.spawn(body, size, timeout=60)}) == 1


class Turned(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(number + 1j))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).conj()


@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
def test_complex_and_double_members(backend: str) -> None:
    def body() -> None:
        ensemble, x = DistributedEnsemble(Turned, 3), torch.tensor([1.0, 2.0])
        wanted = torch.stack([(x * (number + 1j)).conj() for number in range(3)])
        torch.testing.assert_close(ensemble.outputs(x), wanted.resolve_conj())
        mean, variance = ensemble.moments(x)
        torch.testing.assert_close(mean, wanted.mean(0))
        torch.testing.assert_close(variance, wanted.var(0))
        lonely = DistributedEnsemble(lambda number: net(number).double(), 1)  # one rank has none
        assert lonely(torch.ones(2, 4).double()).dtype == torch.float64
        losses = lonely.backward(F.mse_loss, torch.ones(2, 4).double(), torch.zeros(2, 3).double())
        assert losses.dtype == torch.float64
        assert len(losses) == len(lonely.mine)

    dist_prims.spawn(body, 2, timeout=60, backend=backend)


@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
def test_an_ensemble_that_fails_on_one_rank_fails_on_all(backend: str) -> None:
    """Each is followed by the next on all ranks: no rank still waits."""

    def body() -> None:
        one = dist.get_rank() == 1
        own = MismatchError if not one else (ValueError, TypeError)
        with pytest.raises(own, match="member 1 is a NoneType, not a Module"):
            DistributedEnsemble((lambda number: None) if one else net, 3)
        with pytest.raises(own, match="count=None with a function"):
            DistributedEnsemble(net, None if one else 3)
        with pytest.raises(own, match="a Tanh, has neither parameters nor buffers"):
            DistributedEnsemble((lambda number: nn.Tanh()) if one else net, 3)
        with pytest.raises(RuntimeError, match="deepcopy"):  # a MismatchError is one
            DistributedEnsemble(Unready if one else net, 3)
        ensemble, x = DistributedEnsemble(net, 3), torch.ones(2, 4)
        with pytest.raises(own, match="member 5; there are 3"):
            ensemble.member(5 if one else 0)
        with pytest.raises(own, match="'float' object"):
            ensemble.member(1.0 if one else 1)  # type: ignore[arg-type]
        mine = torch.ones(len(ensemble.mine))
        for bad, words in (([1.0, 1.0], "a list for 2 members"), (torch.tensor(1.0), r"shape \(\) for 2 members")):
            with pytest.raises(own, match=words):
                ensemble.gather(bad if one else mine)  # type: ignore[arg-type]
        with pytest.raises(MismatchError, match=r"correction=[01].*correction=[01]"):
            ensemble.moments(x, correction=int(one))
        assert ensemble.gather(mine).tolist() == [1.0] * 3

    dist_prims.spawn(body, 2, timeout=60, backend=backend)


class Unready(nn.Linear):
    """Its copy cannot be made: an attribute has a graph."""

    def __init__(self, number: int) -> None:
        super().__init__(4, 3)
        self.cached = (self.weight * 0).abs()  # alike in all members


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
