"""Ensembles: on any number of ranks what their members give and learn alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import dist_prims
from dist_prims.errors import MismatchError
from dist_prims.patterns.ensemble import DistributedEnsemble
from dist_prims.patterns.row_shards import Kind, gather, share


def net(seed: int, width: int = 5) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))


def batch(*shape: int, seed: int = 100) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Tied(torch.nn.Module):
    """A weight with two names, a buffer that is no state, and one that has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.randn(4), persistent=False)
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))) + self.shift


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            torch.nn.Linear(4, 6, bias=False),
            torch.nn.BatchNorm1d(6),
            torch.nn.Linear(6, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


@settings(deadline=None)
@given(count=st.integers(0, 200), size=st.integers(1, 40))
def test_shares_are_the_rows_in_order_and_even(count: int, size: int) -> None:
    shares = [share(count, size, rank) for rank in range(size)]
    assert [row for each in shares for row in each] == list(range(count))
    lengths = [*map(len, shares)]
    assert max(lengths) - min(lengths) <= 1
    assert count == 0 or lengths[-1] > 0


@pytest.mark.parametrize(("size", "backend"), [(1, "gloo"), (2, "dist_prims"), (3, "gloo"), (4, "dist_prims")])
def test_rows_of_any_dtype_come_in_order(size: int, backend: str) -> None:
    def body() -> None:
        world, cpu = dist.group.WORLD, torch.device("cpu")
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64):
            for count, shape in ((0, (2,)), (1, ()), (5, (3, 2)), (8, (0,)), (4, ())):
                whole = (batch(count, *shape) * 10).to(dtype)
                mine = share(count, size, dist.get_rank())
                rows = whole[mine.start : mine.stop] if mine else None
                kind = Kind(dtype, shape)
                assert torch.equal(gather(rows, kind, count, world, cpu), whole), (dtype, count)
                there = gather(rows, kind, count, world, cpu, root=size - 1)
                assert there is None if dist.get_rank() < size - 1 else torch.equal(there, whole)

    dist_prims.spawn(body, size, timeout=60, backend=backend)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("size", "backend"), [(1, "gloo"), (2, "dist_prims"), (3, "gloo"), (4, "dist_prims")])
def test_outputs_are_those_of_the_loop(size: int, backend: str) -> None:
    def body() -> None:
        for count in (1, 3, 10):
            members = [net(seed) for seed in range(count)]
            x, own = batch(7, 4), batch(count, 7, 4)
            ensemble = DistributedEnsemble(members)
            loop = torch.stack([model(x) for model in members]).detach()
            torch.testing.assert_close(ensemble.outputs(x), loop)
            torch.testing.assert_close(ensemble.mean(x), loop.mean(0))
            assert torch.equal(ensemble.vote(x), ensemble.votes(x).argmax(-1))
            assert torch.equal(ensemble.votes(x), F.one_hot(loop.argmax(-1), 3).sum(0))
            assert torch.equal(ensemble.votes(x, dim=0), F.one_hot(loop.argmax(1), 7).sum(0).T)
            torch.testing.assert_close(ensemble.variance(x), loop.var(0), equal_nan=True)
            torch.testing.assert_close(ensemble.moments(x, correction=0)[1], loop.var(0, correction=0))
            at_root = ensemble.outputs(x, root=size - 1)
            assert at_root is None if dist.get_rank() < size - 1 else torch.allclose(at_root, loop, atol=1e-5)
            each = torch.stack([model(mine) for model, mine in zip(members, own, strict=True)]).detach()
            torch.testing.assert_close(ensemble.outputs(own, each=True), each)
            mine = own[ensemble.mine.start : ensemble.mine.stop]
            torch.testing.assert_close(ensemble.mean(mine, each=True), each.mean(0))
            assert ensemble(x).shape == ((len(ensemble.mine), 7, 3) if ensemble.mine else (0,))

    dist_prims.spawn(body, size, timeout=60, backend=backend)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_and_inputs(dtype: torch.dtype) -> None:
    def body() -> None:
        members = [torch.nn.Bilinear(3, 4, 2).to(dtype) for _ in range(3)]
        for number, member in enumerate(members):
            torch.nn.init.normal_(member.weight, generator=torch.Generator().manual_seed(number))
            torch.nn.init.zeros_(member.bias)
        ensemble = DistributedEnsemble(torch.nn.ModuleList(members))
        x, y = batch(2, 3).to(dtype), batch(2, 4).to(dtype)
        loop = torch.stack([member(x, y) for member in members]).detach()
        torch.testing.assert_close(ensemble.outputs((x, y)), loop)
        mean = ensemble.mean((x, y))
        assert mean.dtype == dtype
        torch.testing.assert_close(mean, loop.mean(0))
        nothing = ensemble.outputs((x[:0], y[:0]))
        assert nothing.shape == (3, 0, 2)

    dist_prims.spawn(body, 2, timeout=60)


def trained_alone(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, optimizer: Callable[..., Any]) -> None:
    steps = optimizer(model.parameters())
    for _ in range(3):
        steps.zero_grad()
        F.cross_entropy(model(x), y).backward()
        steps.step()


@pytest.mark.parametrize(("size", "make"), [(1, Normed), (2, lambda: net(0)), (4, Normed)])
def test_members_learn_as_if_alone(size: int, make: Callable[[], torch.nn.Module]) -> None:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.02)

    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)

    def member(number: int) -> torch.nn.Module:
        model = make()
        for tensor in model.parameters():
            torch.nn.init.normal_(tensor, generator=torch.Generator().manual_seed(number))
        return model

    def body() -> None:
        labels = torch.arange(9) % 3
        for optimizer, each in ((momentum, False), (adam, True)):
            ensemble = DistributedEnsemble(member, 3)
            x = batch(3, 9, 4) if each else batch(9, 4)
            y = labels.expand(3, 9) if each else labels
            steps = optimizer(ensemble.parameters())
            for _ in range(3):
                steps.zero_grad()
                losses = ensemble.backward(F.cross_entropy, x, y, each=each)
                steps.step()
            assert ensemble.gather(losses).shape == (3,)
            for number in range(3):
                alone = member(number)
                trained_alone(alone, x[number] if each else x, labels, optimizer)
                state = ensemble.member(number)  # batch norm's buffers too
                assert [*state] == [*alone.state_dict()]
                for key, value in alone.state_dict().items():
                    torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-5, msg=f"{number} {key}")

    dist_prims.spawn(body, size, timeout=60)


@pytest.mark.parametrize("size", [1, 4])
def test_a_members_state_is_that_of_a_plain_model(size: int) -> None:
    def body() -> None:
        members = []
        for seed in range(3):
            torch.manual_seed(seed)
            members.append(Tied())
        members[0].first.bias.requires_grad_(False)
        members[1].first.bias.requires_grad_(False)
        members[2].first.bias.requires_grad_(False)
        x = batch(2, 4)
        before = [copy.deepcopy(member.state_dict()) for member in members]
        ensemble = DistributedEnsemble(members)
        for number, member in enumerate(members):
            state = ensemble.member(number)
            plain = copy.deepcopy(members[number])
            plain.load_state_dict(state)
            assert all(torch.equal(state[key], before[number][key]) for key in before[number])
            torch.testing.assert_close(ensemble.outputs(x)[number], member(x).detach())
            state["first.bias"].zero_()  # no member has this memory
            assert not torch.equal(ensemble.member(number)["first.bias"], state["first.bias"])
        ensemble.load_member(2, before[0])
        assert torch.equal(ensemble.member(2)["first.weight"], before[0]["first.weight"])
        with pytest.raises(ValueError, match="member 3; there are 3, numbered from 0"):
            ensemble.member(3)
        if 1 in ensemble.mine:
            with pytest.raises(ValueError, match=r"load_member\(1\) on rank \d: '\w+' is missing"):
                ensemble.load_member(1, {})

    dist_prims.spawn(body, size, timeout=60)


@pytest.mark.parametrize("size", [1, 2])
def test_dropout_is_different_for_each_member(size: int) -> None:
    def body() -> float:
        ensemble = DistributedEnsemble([Dropped() for _ in range(3)])
        torch.manual_seed(7)  # alike on every rank
        masks = ensemble.outputs(torch.ones(400))
        assert 0.4 < (masks != 0).float().mean() < 0.6
        for one in range(3):
            for other in range(one):
                assert 0.3 < ((masks[one] != 0) == (masks[other] != 0)).float().mean() < 0.7, (one, other)
        assert not torch.equal(ensemble.outputs(torch.ones(400)), masks)
        torch.manual_seed(7)
        assert torch.equal(ensemble.outputs(torch.ones(400)), masks)
        assert torch.equal(ensemble.eval().outputs(torch.ones(400)), torch.ones(3, 400))
        return torch.rand(()).item()  # what comes after is alike on all ranks still

    assert len({*dist_prims.spawn(body, size, timeout=60)}) == 1


class Dropped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, self.training) * self.scale


def test_an_ensemble_in_a_subgroup() -> None:
    def body() -> None:
        group = dist.new_group([0, 2])
        if dist.get_rank() != 1:
            members = [net(seed) for seed in range(3)]
            ensemble = DistributedEnsemble(members, group=group)
            x = batch(2, 4)
            loop = torch.stack([model(x) for model in members]).detach()
            torch.testing.assert_close(ensemble.outputs(x), loop)
            torch.testing.assert_close(ensemble.mean(x), loop.mean(0))
            at_root = ensemble.outputs(x, root=1)
            assert at_root is None if dist.get_rank() == 0 else len(at_root) == 3
            assert torch.equal(ensemble.member(2)["0.weight"], members[2].state_dict()["0.weight"])
        dist_prims.barrier()

    dist_prims.spawn(body, 3, timeout=60)


def odd(number: int) -> torch.nn.Module:
    return net(number, width=6 if number == 2 else 5)


def unnamed(number: int) -> torch.nn.Module:
    return torch.nn.Linear(4, 3, bias=number != 2)


def forgetful(number: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.1 * number if number == 2 else 0.5))


def frozen(number: int) -> torch.nn.Module:
    return torch.nn.Linear(4, 3).requires_grad_(number != 2)


def asleep(number: int) -> torch.nn.Module:
    return torch.nn.Linear(4, 3).train(number != 2)


UNLIKE = [
    (odd, r"member [02] has parameter '0\.weight' .*shape \([56], 4\).*member [23] has parameter '0\.weight' "),
    (unnamed, r"'bias'"),
    (forgetful, r"member [02] has layer '1' Dropout\(p=0\.[52].*member [23] has layer '1' Dropout\(p=0\.[52]"),
    (frozen, r"'weight' .*requires_grad=(True|False).*'weight' .*requires_grad=(True|False)"),
    (asleep, r"has training=(True|False), member [23] has training=(True|False)"),
]


@pytest.mark.parametrize("size", [1, 3])
def test_members_of_unlike_shape_are_refused_on_every_rank(size: int) -> None:
    def body() -> None:
        for make, words in UNLIKE:
            with pytest.raises((ValueError, MismatchError), match=words):
                DistributedEnsemble(make, 4)
            with pytest.raises((ValueError, MismatchError), match=words):
                DistributedEnsemble([make(number) for number in range(4)])
        dist_prims.barrier()  # no rank still waits

    dist_prims.spawn(body, size, timeout=60)


def test_what_cannot_be_an_ensemble() -> None:
    def body() -> None:
        rank = dist.get_rank()
        with pytest.raises(ValueError, match="0 members; at least 1 is needed"):
            DistributedEnsemble([])
        with pytest.raises(ValueError, match=r"count=None with a function; give a list of models"):
            DistributedEnsemble(net)
        with pytest.raises(ValueError, match=r"count=2 with a list"):
            DistributedEnsemble([net(0), net(1)], 2)
        with pytest.raises(MismatchError, match="Rank 0 has an ensemble of 2 members; rank 1 has an ensemble of 3"):
            DistributedEnsemble(net, 2 + rank)

        def fails(number: int) -> torch.nn.Module:
            raise OSError(f"no weights for {number}")

        own = OSError if rank == 1 else MismatchError
        with pytest.raises(own, match="no weights for 1"):
            DistributedEnsemble(fails if rank == 1 else net, 2)
        dist_prims.barrier()

    dist_prims.spawn(body, 2, timeout=60)


@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
def test_ranks_that_disagree_get_an_error_and_go_on(backend: str) -> None:
    def body() -> None:
        rank, ensemble = dist.get_rank(), DistributedEnsemble(net, 5)
        with pytest.raises(MismatchError, match=r"float32 \[7, 3\].*float32 \[8, 3\]"):
            ensemble.outputs(batch(7 + (rank == 1), 4))
        with pytest.raises(MismatchError, match=r"has mean, 5 members.*has outputs, 5 members"):
            ensemble.mean(batch(2, 4)) if rank == 0 else ensemble.outputs(batch(2, 4))
        with pytest.raises(MismatchError, match=r"has outputs to 0.*has outputs to 1"):
            ensemble.outputs(batch(2, 4), root=min(rank, 1))
        with pytest.raises(RuntimeError if rank == 2 else MismatchError, match=r"mat1 and mat2|Expected size"):
            ensemble.mean(batch(2, 5 if rank == 2 else 4))
        with pytest.raises(ValueError, match=r"each=True with 4 batches.*all 5 members"):
            ensemble.outputs(batch(4, 2, 4), each=True)
        with pytest.raises(ValueError, match="root=9; the group has ranks 0 to 2"):
            ensemble.outputs(batch(2, 4), root=9)
        with pytest.raises(ValueError, match=r"dim=2 is not a dimension of outputs of shape \(2, 3\)"):
            ensemble.votes(batch(2, 4), dim=2)
        with pytest.raises(ValueError, match=r"on rank \d: 7 rows for [12] members"):
            ensemble.gather(torch.zeros(7))
        with pytest.raises(ValueError, match=r"must give one number; it gives shape \(2, 3\)"):
            ensemble.backward(lambda x, y: x, batch(2, 4), None)
        torch.testing.assert_close(ensemble.mean(batch(2, 4)), ensemble.outputs(batch(2, 4)).mean(0))

    dist_prims.spawn(body, 3, timeout=60, backend=backend)


class Chooses(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).argmax(-1)


def test_outputs_that_have_no_mean() -> None:
    def body() -> None:
        ensemble = DistributedEnsemble([Chooses(4, 3) for _ in range(3)])
        assert ensemble.outputs(batch(2, 4)).dtype == torch.int64
        with pytest.raises(ValueError, match=r"outputs are torch\.int64 and have no mean"):
            ensemble.mean(batch(2, 4))

    dist_prims.spawn(body, 2, timeout=60)
