"""ZeRO-1: sharded states of optimisers, equal to the plain run; and both forms on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from sharding import MixedNet, alike, average, loss_of, nbytes, spawn, states

import dist_prims
from dist_prims.errors import MismatchError
from dist_prims.training.sharding import ShardedParameters, ZeroOptimizer
from dist_prims.training.sharding.optimizer import balanced

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("momentum", 1),
        ("adamw", 2),
        ("rmsprop", 3),
        ("momentum", 4),
        pytest.param("adamw", 7, marks=pytest.mark.slow),  # more ranks than large parameters
    ],
)
def test_zero_1_steps_as_the_plain_run(name: str, size: int) -> None:
    kind, options = OPTIMIZERS[name]

    def body() -> None:
        rank = dist.get_rank()
        model, plain = MixedNet(), MixedNet()
        if rank:  # rank 0's values count
            torch.nn.init.zeros_(model.scale)
        optimizer, twin = ZeroOptimizer(model.parameters(), kind, **options), kind(plain.parameters(), **options)
        slower = [torch.optim.lr_scheduler.ExponentialLR(each, 0.7) for each in (optimizer, twin)]
        for step in range(4):
            for net, over, scheduler in zip((model, plain), (optimizer, twin), slower, strict=True):
                over.zero_grad()
                loss_of(net, step, rank).backward()
                if net is plain:
                    average(plain)
                over.step()
                scheduler.step()
        alike(model.parameters(), plain.parameters())
        held = torch.tensor(nbytes(states(optimizer)))
        dist.all_reduce(held)
        assert held == nbytes(states(twin)) > 0  # each state on one rank

    spawn(body, size)


@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
def test_zero_1_over_gradients_averaged_before_and_groups_of_parameters(backend: str) -> None:
    def body() -> None:
        rank = dist.get_rank()
        model, plain = MixedNet(), MixedNet()
        averager = dist_prims.GradientAverager(model)

        def groups(net: MixedNet) -> list[dict[str, Any]]:
            return [{"params": [net.embed.weight], "lr": 0.5}, {"params": [*net.fine.parameters()], "momentum": 0.3}]

        optimizer = ZeroOptimizer(groups(model), torch.optim.SGD, average=False, lr=0.1)
        twin = torch.optim.SGD(groups(plain), lr=0.1)
        for step in range(3):
            for net, over in ((model, optimizer), (plain, twin)):
                over.zero_grad()

                def closure(net: MixedNet = net, step: int = step) -> torch.Tensor:
                    loss = loss_of(net, step, rank)
                    loss.backward()
                    if net is plain:
                        average(net)
                    return loss

                assert over.step(closure) > 0
        averager.remove()
        alike(model.parameters(), plain.parameters())

    spawn(body, 2, backend=backend)  # of two gradients there is one sum


def trained(kind: str, state: dict[str, Any] | None, steps: range) -> dict[str, Any]:
    """The same batches on every rank, so that any number of ranks trains alike; plain where there is one rank."""
    model = MixedNet()
    make: Any = torch.optim.AdamW if kind == "plain" else lambda p, **o: ZeroOptimizer(p, torch.optim.AdamW, **o)
    optimizer = make(model.named_parameters(), lr=0.01, amsgrad=True)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank=0).backward()
        optimizer.step()
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def test_zero_1_goes_on_on_any_number_of_ranks() -> None:
    def run(kind: str, size: int, state: Any, steps: range) -> Any:
        found = spawn(trained, size, kind, state, steps)
        assert all(each["optimizer"]["state"].keys() == found[0]["optimizer"]["state"].keys() for each in found)
        return found[-1]

    plain = run("plain", 1, None, range(6))
    half = run("zero", 4, None, range(3))
    quarter = run("zero", 2, half, range(3, 5))
    for kind in ("plain", "zero"):
        ended = run(kind, 1, quarter, range(5, 6))
        alike(ended["model"].values(), plain["model"].values())
        for number, each in plain["optimizer"]["state"].items():
            alike(ended["optimizer"]["state"][number].values(), each.values())
    assert half["optimizer"]["param_groups"][0]["param_names"] == [name for name, _ in MixedNet().named_parameters()]


def test_zero_1_in_a_part_of_the_ranks() -> None:
    def body() -> None:
        group = dist.new_group([2, 0])
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match="not a member"):
                ZeroOptimizer(MixedNet().parameters(), torch.optim.SGD, group=group)
            return
        model = torch.nn.Linear(3, 2)
        torch.nn.init.constant_(model.weight, 1.0 + dist.get_rank())
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, lr=1.0, group=group)
        model.weight.grad = torch.full((2, 3), float(dist.get_rank()))
        optimizer.step()
        first = 1.0 + dist.get_process_group_ranks(group)[0]
        assert torch.equal(model.weight, torch.full((2, 3), first - 1)), model.weight
        assert set(optimizer.state_dict()) == {"state", "param_groups"}

    spawn(body, 3)


def test_zero_1_refuses_before_anything_is_sent() -> None:
    def body() -> None:
        rank = dist.get_rank()
        with pytest.raises(MismatchError, match=r"Rank 0 has tensor '0' .*\(2, 3\).* rank 1 has .*\(2, 4\)"):
            ZeroOptimizer(torch.nn.Linear(3 + rank, 2).parameters(), torch.optim.SGD)
        with pytest.raises(MismatchError, match="average=True, SGD; rank 1 has average=True, Adam"):
            ZeroOptimizer(MixedNet().parameters(), (torch.optim.SGD, torch.optim.Adam)[rank])
        with pytest.raises(ValueError, match="LBFGS steps along all parameters"):
            ZeroOptimizer(MixedNet().parameters(), torch.optim.LBFGS)
        for different in ({"lr": 0.1 + rank}, {"lr": 0.1, "betas": (0.9, 0.9 + 0.05 * rank)}):
            with pytest.raises(MismatchError, match=f"parameters with {{.*'lr': {0.1}.*}}; rank 1 has a group of"):
                ZeroOptimizer(torch.nn.Linear(2, 1).parameters(), torch.optim.Adam, **different)
        layer = torch.nn.Embedding(4, 2, sparse=rank == 1)
        optimizer = ZeroOptimizer(layer.named_parameters(), torch.optim.SGD, lr=1.0)
        before = layer.weight.detach().clone()
        layer(torch.tensor([1])).sum().backward()
        with pytest.raises(ValueError, match="parameter 'weight' on rank 1 has a sparse gradient"):
            optimizer.step()
        layer.weight.grad = None
        if rank == 0:
            layer.weight.data = layer.weight.data.double()
        with pytest.raises(ValueError, match="parameter 'weight' on rank 0 has changed its shape, dtype or device"):
            optimizer.step()
        assert torch.equal(layer.weight.float(), before)
        with pytest.raises(ValueError, match="assigned to ranks once"):
            optimizer.add_param_group({"params": [torch.ones(1)]})

    spawn(body, 2)


def test_zero_1_deals_out_and_copies_what_has_a_state() -> None:
    def body() -> None:
        frozen = torch.nn.Linear(30, 30).requires_grad_(False)
        model = torch.nn.Sequential(frozen, *(torch.nn.Linear(30, 30) for _ in range(4)))
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)

        def step() -> None:
            model(torch.ones(2, 30)).square().mean().backward()
            optimizer.step()

        step()
        assert nbytes(states(optimizer)) == 2 * 2 * 4 * 31 * 30  # of half of what is trained
        kept = optimizer.state_dict()
        values = copy.deepcopy(kept)
        step()
        for number, each in values["state"].items():
            alike(kept["state"][number].values(), each.values())
        with pytest.raises(ValueError, match=r"groups of \[10\] parameters, this optimizer of \[2\]"):
            ZeroOptimizer(torch.nn.Linear(2, 1).parameters(), torch.optim.Adam).load_state_dict(kept)

    spawn(body, 2)


@given(counts=st.lists(st.integers(0, 10**6), max_size=40), parts=st.integers(1, 9))
def test_shares_are_balanced(counts: list[int], parts: int) -> None:
    owners = balanced(counts, parts)
    loads = [sum(n for n, owner in zip(counts, owners, strict=True) if owner == part) for part in range(parts)]
    assert sum(loads) == sum(counts)
    assert max(loads) <= sum(counts) / parts + max(counts, default=0) * (1 - 1 / parts) + 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_a_gpu() -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for sharding in (1, 3):
            model, plain = (MixedNet().cuda() for _ in range(2))
            over = ShardedParameters(model) if sharding == 3 else None
            optimizer: Any = (
                torch.optim.Adam(over.parameters(), lr=0.01)
                if over
                else ZeroOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
            )
            twin = torch.optim.Adam(plain.parameters(), lr=0.01)
            for net, each in ((model, optimizer), (plain, twin)):
                net(torch.arange(5, device="cuda"), 0).square().mean().backward()
                each.step()
            found = over.state_dict() if over else model.state_dict()
            alike(found.values(), plain.state_dict().values(), exact=False)
    finally:
        dist.destroy_process_group()
