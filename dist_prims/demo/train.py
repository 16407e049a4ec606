"""Synchronous data-parallel SGD on the digits, and the checks of its result.

Each rank computes gradients on its part of the batch, the gradients are averaged, and every rank makes the same step.
Therefore the ranks must hold the same weights to the last bit. The losses must equal the losses of one process that
trains on the whole batch, except for the order of additions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from .._console import Console
from ..collectives import all_gather, all_reduce, broadcast
from ..datasets import digits
from ..training import DataPartitioner, Partition, average_gradients

__all__: list[str] = []

_SEED, _EPOCHS, _BATCH, _RATE = 7, 12, 64, 0.1
_GOAL, _TOLERANCE = 0.95, 1e-3

Batch = tuple[torch.Tensor, torch.Tensor]


def train_digits(console: Console) -> dict[str, list[tuple[float, float]]]:
    """Train, check, and return two loss curves: of the ranks, and of one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    console.title(
        f"A convolutional network learns handwritten digits: synchronous SGD on {size} rank{'s' * (size != 1)}"
    )
    images = DataPartitioner(digits(), [0.8, 0.2], _SEED)
    learned, held_out = images.use(0), _batch(images.use(1), range(len(images.use(1))))
    parts = DataPartitioner(learned, [1 / size] * size, _SEED)
    steps = len(learned) // size // (_BATCH // size)

    def mine(epoch: int) -> Iterator[Batch]:
        return _batches(parts.use(rank), rank, epoch, steps, _BATCH // size)

    def global_batches(epoch: int) -> Iterator[Batch]:
        of_ranks = (_batches(parts.use(each), each, epoch, steps, _BATCH // size) for each in range(size))
        for batches in zip(*of_ranks, strict=True):
            yield torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])

    model = _net()
    for parameter in model.parameters():
        broadcast(parameter.data)
    losses = _train(model, mine, average_gradients, _report(console, model, held_out, size))
    accuracy = _accuracy(model, held_out)
    console.check(accuracy >= _GOAL, f"{accuracy:.1%} of {len(held_out[1])} held-out images are classified right")
    console.check(_same_everywhere(model), "all ranks hold the same weights, to the last bit")

    alone = _train(_net(), global_batches, lambda model: None, lambda epoch, loss: None) if rank == 0 else losses
    # Training amplifies rounding differences, by an amount that depends on the processor: compare early steps only.
    early = len(losses) // 2
    apart = max(abs(ours - one) for ours, one in zip(losses[:early], alone[:early], strict=True))
    console.check(apart <= _TOLERANCE, f"the first {early} losses equal a single process's within {_TOLERANCE:g}")
    return {f"{size} ranks": _curve(losses), "one process": _curve(alone)}


def _net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )


def _batches(part: Partition, rank: int, epoch: int, steps: int, count: int) -> Iterator[Batch]:
    """The batches of a rank in one epoch; every rank computes the same batches for a given rank."""
    generator = torch.Generator().manual_seed(_SEED + 1000 * epoch + rank)
    order = torch.randperm(len(part), generator=generator).tolist()
    for step in range(steps):
        yield _batch(part, order[step * count : (step + 1) * count])


def _batch(part: Partition, indices: list[int] | range) -> Batch:
    images, labels = zip(*(part[index] for index in indices), strict=True)
    return torch.stack(images), torch.stack(labels)


def _train(
    model: nn.Module,
    batches_of: Callable[[int], Iterator[Batch]],
    average: Callable[[nn.Module], None],
    report: Callable[[int, float], None],
) -> list[float]:
    """Train and return the loss of every step, averaged over the ranks if the gradients are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9)
    losses = []
    for epoch in range(_EPOCHS):
        for images, labels in batches_of(epoch):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            average(model)
            optimizer.step()
            losses.append(loss.detach())
        report(epoch, float(losses[-1]))
    curve = torch.stack(losses)
    if average is average_gradients:
        all_reduce(curve, dist.ReduceOp.AVG)
    return curve.tolist()


def _report(console: Console, model: nn.Module, held_out: Batch, size: int) -> Callable[[int, float], None]:
    def report(epoch: int, loss: float) -> None:
        if console.rank == 0:
            right = f"held-out accuracy {_accuracy(model, held_out):.1%}"
            console.progress(f"  epoch {epoch + 1:2} of {_EPOCHS}   loss {loss:.4f}   {right}", epoch + 1 == _EPOCHS)

    return report


@torch.no_grad()
def _accuracy(model: nn.Module, batch: Batch) -> float:
    images, labels = batch
    return float((model(images).argmax(1) == labels).float().mean())


def _same_everywhere(model: nn.Module) -> bool:
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    rows = mine.new_empty(dist.get_world_size() * len(mine))
    all_gather(rows, mine)
    return all(torch.equal(mine.view(torch.int32), row.view(torch.int32)) for row in rows.view(-1, len(mine)))


def _curve(losses: list[float]) -> list[tuple[float, float]]:
    return [(float(step), loss) for step, loss in enumerate(losses, start=1)]
