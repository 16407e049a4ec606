"""ZeRO: optimizer states, then parameters, sharded over the ranks: less memory, the same results.

The same small network is trained without sharding, with ZeRO-1 and with ZeRO-3, on groups of 1, 2, 4, ... ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from .._console import Console
from ..training.average import average_gradients
from ..training.sharding import ShardedParameters, ZeroOptimizer

__all__: list[str] = []

_WIDTH, _DEPTH, _STEPS = 128, 6, 5
_FORMS = ("plain", "ZeRO-1", "ZeRO-3")


def run(console: Console) -> None:
    world = dist.get_world_size()
    rows = []
    for size in sorted({1, 2, 4, world}):
        if size <= world:
            rows += _compare(console, size)
    console.table(("KB on each rank", "ranks", "parameters", "gradients", "states", "gathered peak", "sum"), rows)
    console.say("  Sizes between steps; 'gathered peak': the parameters that ZeRO-3 gathers while a layer computes.")


def _compare(console: Console, size: int) -> list[tuple[object, ...]]:
    group = dist.new_group(list(range(size)))
    if console.rank < size:
        found = {form: _train(form, group) for form in _FORMS}
    exact = torch.tensor([True, True])
    rows: list[tuple[object, ...]] = []
    if console.rank < size:
        weights, bytes_of = zip(*found.values(), strict=True)
        exact = torch.tensor([_close(weights[0], other) for other in weights[1:]])
        rows = [(form, size, *(f"{n / 1024:.0f}" for n in each)) for form, each in zip(_FORMS, bytes_of, strict=True)]
    for form, holds in zip(_FORMS[1:], exact.tolist(), strict=True):
        console.check(holds, f"{form} on {_count(size)}: after {_STEPS} steps of Adam the plain run's weights")
    if console.rank < size:
        dist.destroy_process_group(group)
    return rows


def _train(form: str, group: dist.ProcessGroup) -> tuple[list[torch.Tensor], list[int]]:
    """The final weights, and the bytes of parameters, gradients, states, the gathered peak, and their sum."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(_layer() for _ in range(_DEPTH)))
    sharded = ShardedParameters(model, group=group) if form == "ZeRO-3" else None
    optimizer: torch.optim.Optimizer
    if form == "ZeRO-1":
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.Adam, group=group, lr=1e-3)
    else:
        optimizer = torch.optim.Adam(sharded.parameters() if sharded else model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(group.rank())
    for _ in range(_STEPS):
        optimizer.zero_grad()
        x = torch.randn(8, _WIDTH, generator=draw)
        (model(x) - x.roll(1, 1)).square().mean().backward()
        if form == "plain":
            average_gradients(model, group)
        optimizer.step()
    held = [*(sharded.parameters() if sharded else model.parameters())]
    states = [value for each in optimizer.state.values() for value in each.values()]
    figures = [_bytes(held), _bytes(each.grad for each in held), _bytes(states), sharded.peak_bytes if sharded else 0]
    weights = sharded.state_dict() if sharded else model.state_dict()
    return [*weights.values()], [*figures, sum(figures)]


def _layer() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.Tanh())


def _close(ours: Iterable[torch.Tensor], plain: Iterable[torch.Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=0, atol=1e-5) for one, other in zip(ours, plain, strict=True))


def _bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """The bytes of the tensors' storages, each storage counted once."""
    pieces = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors if each is not None}
    return sum(piece.nbytes() for piece in pieces.values())


def _count(size: int) -> str:
    return f"{size} rank{'s' * (size != 1)}"
