"""ZeRO-3: sharded parameters train as the plain run does, and at most one unit of them is whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_zero import Net, alike, average, loss_of, nbytes, spawn, states
from torch.utils.checkpoint import checkpoint

from dist_prims.errors import MismatchError
from dist_prims.training.zero import ShardedParameters


def accumulated(model: torch.nn.Module, steps: Iterable[int], branch: int | None) -> None:
    """Each backward's gradients averaged, then added up."""
    total: dict[torch.nn.Parameter, torch.Tensor] = {}
    for step in steps:
        model.zero_grad()
        loss_of(model, step, dist.get_rank(), branch).backward()
        average(model)
        for each in model.parameters():
            if each.grad is not None:
                total[each] = total[each] + each.grad if each in total else each.grad.clone()
    for each in model.parameters():
        each.grad = total.get(each)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("units", ["children", "two", "none"])
def test_zero_3_trains_as_the_plain_run(size: int, units: str) -> None:
    def body(exact: bool) -> None:
        rank, model, plain = dist.get_rank(), Net(), Net()
        if rank:  # rank 0's values count
            torch.nn.init.zeros_(model.scale)
        named = {"children": None, "two": [model.blocks[1], model.fine], "none": []}[units]
        branch = 0 if units == "children" else None  # all ranks run the same units; what runs in them may differ
        sharded = ShardedParameters(model, named)
        kind = torch.optim.Adam if exact else torch.optim.SGD  # Adam makes steps of a gradient that is only rounding
        optimizer, twin = (kind(each, lr=0.01) for each in (sharded.parameters(), plain.parameters()))
        for step in range(3):
            optimizer.zero_grad()
            for micro in (2 * step, 2 * step + 1):
                loss_of(model, micro, rank, branch).backward()
            accumulated(plain, (2 * step, 2 * step + 1), branch)
            for over in (optimizer, twin):
                over.step()
        assert all(each.grad is None for each in model.parameters())
        alike(sharded.state_dict().values(), plain.state_dict().values(), exact)
        loss = loss_of(plain.eval(), 9, rank, 0)
        model.eval()
        for mode in (torch.no_grad, torch.inference_mode, sharded.gathered):
            with mode():
                alike([loss_of(model, 9, rank, 0)], [loss], exact)
        sharded.remove()
        alike(model.state_dict().values(), plain.state_dict().values(), exact)
        loss_of(model, 9, rank, 0).backward()
        assert model.fine.weight.grad is not None

    spawn(body, size, True)
    if size == 3 and units == "two":
        spawn(body, size, False, backend="gloo")


def test_zero_3_clips_as_the_plain_run() -> None:
    def body() -> None:
        model, plain = Net(), Net()
        sharded = ShardedParameters(model)
        loss_of(model, 0, dist.get_rank(), 0).backward()
        loss_of(plain, 0, dist.get_rank(), 0).backward()
        average(plain)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        alike([sharded.clip_grad_norm(0.5)], [expected.float()], exact=False)
        left = torch.stack(
            [each.grad.double().square().sum() for each in sharded.parameters() if each.grad is not None]
        )
        total = left.sum()
        dist.all_reduce(total)
        assert abs(total.sqrt().item() - 0.5) < 1e-5

    spawn(body, 3)


def test_zero_3_holds_one_unit_at_a_time_and_gives_the_rest_back() -> None:
    def body() -> None:
        size, width, depth = dist.get_world_size(), 64, 5
        layers = [torch.nn.Linear(width, width) for _ in range(depth)]
        model = torch.nn.Sequential(*(torch.nn.Sequential(layer) for layer in layers))
        unit_bytes = nbytes(layers[0].parameters())
        sharded = ShardedParameters(model)
        optimizer = torch.optim.Adam(sharded.parameters(), lr=0.01)

        def whole() -> list[int]:
            return [n for n, each in enumerate(layers) if each.weight.untyped_storage().nbytes() > 100]

        seen = []
        for layer in layers:
            layer.register_forward_hook(lambda *_: seen.append(whole()))
            layer.register_full_backward_hook(lambda *_: seen.append(whole()))
        y = model(torch.ones(3, width, requires_grad=True))
        assert whole() == []  # though backward has yet to come
        y.sum().backward()
        optimizer.step()
        assert whole() == []
        assert seen == [*([n] for n in range(depth)), *([n] for n in reversed(range(depth)))]
        assert sharded.peak_bytes <= unit_bytes + 4 * size
        part = depth * (-(-unit_bytes // 4 // size) * 4)
        assert nbytes(sharded.parameters()) == nbytes(each.grad for each in sharded.parameters()) == part
        assert nbytes(states(optimizer)) == 2 * part
        assert sum(each.untyped_storage().nbytes() for each in model.parameters()) <= 4 * 2 * depth

    for size in (2, 3):
        spawn(body, size)


def test_zero_3_under_checkpoints() -> None:
    """Whole units that are computed again, by hooks of autograd around ours and in it; and what is not asked for."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()) for _ in range(4)
            )
            self.again = True
            self.calls = 0
            self.layers[0].register_forward_pre_hook(self.count)

        def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
            x = torch.nn.functional.one_hot(x % 4, 4).float()
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
            return torch.nn.functional.pad(x, (0, 3))

        def count(self, *_: Any) -> None:
            self.calls += 1

    def body() -> None:
        model, plain = Model(), Model()
        plain.again = False
        sharded = ShardedParameters(model)
        loss_of(model, 0, dist.get_rank()).backward()
        assert model.calls == 2  # the checkpoint has computed it again: our hooks have not taken its place
        sharded_grads = [each.grad for each in sharded.parameters()]
        loss_of(plain, 0, dist.get_rank()).backward()
        average(plain)
        rank, size = dist.get_rank(), dist.get_world_size()
        for grad, layer in zip(sharded_grads, plain.layers, strict=True):
            flat = torch.cat([each.grad.flatten() for each in layer.parameters()])
            flat = torch.nn.functional.pad(flat, (0, -len(flat) % size))
            alike([grad], [flat.view(size, -1)[rank]])

    spawn(body, 3)


def test_zero_3_goes_on_on_any_number_of_ranks() -> None:
    def body(state: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        model = Net()
        sharded = ShardedParameters(model)
        if state is not None:
            sharded.load_state_dict(state)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        loss_of(model, 0 if state is None else 1, 0, 0).backward()
        optimizer.step()
        return {name: value.clone() for name, value in sharded.state_dict().items()}

    once = spawn(body, 3, None)[1]
    assert list(once) == list(Net().state_dict())
    twice = spawn(body, 2, once)
    plain = Net()
    for step in range(2):
        plain.zero_grad()
        loss_of(plain, step, 0, 0).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for found in twice:
        alike(found.values(), plain.state_dict().values(), exact=False)


def test_zero_3_survives_what_raises() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    def body() -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
        sharded = ShardedParameters(model)
        x = torch.ones(2, 3)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, 4))
        handle = model[1].register_forward_hook(lambda module, given, result: Fails.apply(result))
        with pytest.raises(ZeroDivisionError):
            model(x).sum().backward()
        handle.remove()
        model(x).sum().backward()  # what came before the failure is not in it
        grads = [each.grad.clone() for each in sharded.parameters()]
        sharded.remove()
        model(x).sum().backward()
        for grad, layer in zip(grads, model, strict=True):
            flat = torch.cat([each.grad.flatten() for each in layer.parameters()])
            alike([grad], [flat.view(2, -1)[dist.get_rank()]])

    spawn(body, 2)


def test_zero_3_refuses() -> None:
    def body() -> None:
        rank, model = dist.get_rank(), Net()
        with pytest.raises(MismatchError, match=r"Rank 0 has parameter 'weight' .*\(2, 1\).* rank 1 has .*\(3, 1\)"):
            ShardedParameters(torch.nn.Linear(1, 2 + rank))
        with pytest.raises(ValueError, match="Linear, is no part of the model"):
            ShardedParameters(model, [torch.nn.Linear(1, 1)])
        with pytest.raises(ValueError, match="unit ModuleList has unit Linear in it; name either"):
            ShardedParameters(model, [model.blocks, model.blocks[0][0]])
        with pytest.raises(ValueError, match="the model has no parameters"):
            ShardedParameters(torch.nn.ReLU())
        sharded = ShardedParameters(model)
        assert torch.isnan(model.fine.weight).all()  # who reads out of turn, sees it
        with pytest.raises(ValueError, match=r"'fine\.weight' has shape \(1,\) in the state and \(6, 6\) in the model"):
            sharded.load_state_dict({**Net().state_dict(), "fine.weight": torch.ones(1)})
        with pytest.raises(ValueError, match="'more' is in the state or in the model"):
            sharded.load_state_dict({**Net().state_dict(), "more": torch.ones(1)})
        loss = loss_of(model, 0, rank, 0)
        with torch.no_grad():
            for each in sharded.parameters():
                each.add_(1)
        with pytest.raises(RuntimeError, match="were changed between forward and backward"):
            loss.backward()
        if rank == 1:
            model.fine.bias.requires_grad_(False)
        with pytest.raises(ValueError, match="a parameter of fine was frozen on rank 1 after it was sharded"):
            loss_of(model, 0, rank, 0).backward()
        for change in (Net.half, lambda net: setattr(net.scale, "data", torch.tensor(1.0))):
            model = Net()
            ShardedParameters(model)
            change(model)
            with pytest.raises(ValueError, match=r"was replaced by other data \(torch.float(16|32) on cpu\) after"):
                loss_of(model, 0, rank, 0)
        sparse = torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(2, 1))
        ShardedParameters(sparse)
        with pytest.raises(ValueError, match=r"of shape \(4, 2\) has a sparse gradient"):
            sparse(torch.tensor([1])).sum().backward()

    spawn(body, 2)
