"""Batches of a data set over the ranks, equivalent to the batches of one process.

With batch / ranks items on each rank, the total differs if the ranks do not divide the batch, ranks take different
numbers of steps (a hang), and gradients of uneven batches are averaged as if they were even. Here every batch has the
given number of items in total, the last one the remainder, and all ranks take the same steps. Each rank multiplies its
loss by a weight, own items * ranks / all items; the mean of the ranks' gradients is then the gradient of the mean loss
of the whole batch. A rank without items in a batch gets a substitute item with weight 0: it runs forward and backward
like the other ranks, and adds zero.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch.utils.data import default_collate

from ...agreement import check_lists, gather_values
from .data_rank import place_of
from .partition import DataPartitioner, Items, deal

__all__: list[str] = []


def partition_dataset(
    data: Items,
    batch: int,
    *,
    sizes: Sequence[float] | None = None,
    stratify: ArrayLike | None = None,
    group: dist.ProcessGroup | None = None,
    seed: int = 1234,
    shuffle: bool = True,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> Batches:
    """This rank's part of ``data``, in batches with ``batch`` items on all ranks together.

    >>> data = [(np.ones(2), 1.0)] * 10
    >>> batches = partition_dataset(data, batch=4)
    >>> [(tuple(x.shape), tuple(y.shape), weight) for x, y, weight in batches]
    [((4, 2), (4,), 1.0), ((4, 2), (4,), 1.0), ((2, 2), (2,), 1.0)]

    Train with ``(loss * weight).backward()``, where ``loss`` is a mean over the items, then ``average_gradients``.
    ``sizes``: each rank's share, as fractions or counts; by default even. ``stratify``: see
    :class:`~dist_prims.DataPartitioner`. All ranks make this call with the same arguments; if two differ, all raise
    MismatchError.
    """
    rank, size = place_of("partition_dataset", group, None, None)
    shares = [1 / size] * size if sizes is None else list(sizes)
    problem = ""
    if batch < 1:
        problem = f"batch={batch} must be at least 1"
    elif len(shares) != size:
        problem = f"sizes={shares} has {len(shares)} shares for {size} ranks; give one for each"
    failure = ValueError(f"partition_dataset: rank {rank}: {problem}") if problem else None
    labels = None if stratify is None else np.asarray(stratify)
    rest = zlib.crc32(repr((shuffle, shares, None if labels is None else labels.tolist())).encode())
    arguments = [f"len(data)={len(data)}", f"batch={batch}", f"seed={seed}"]
    arguments.append(f"one of shuffle, sizes and stratify (by checksum)={rest}")
    found = gather_values(arguments, group, "partition_dataset", failure)
    check_lists("partition_dataset", found, "Call it with the same arguments on every rank", group)
    parts = DataPartitioner(data, shares, seed, stratify=labels)
    return Batches(parts, batch, rank, seed=seed, shuffle=shuffle, collate=collate)


class Batches:
    """The batches of one rank; each iteration is an epoch in a new order.

    >>> batches = Batches(DataPartitioner(range(5), [0.8, 0.2]), batch=2, rank=1)
    >>> [weight for numbers, weight in batches]  # of the second two items one is this rank's
    [0.0, 1.0, 0.0]
    >>> len(batches), batches.epoch
    (3, 1)

    A batch is ``(fields..., weight)`` if items are tuples or lists, else ``(batch, weight)``. ``epoch`` is the number
    of the next epoch; set it to resume from a checkpoint.
    """

    def __init__(
        self,
        parts: DataPartitioner,
        batch: int,
        rank: int,
        *,
        seed: int = 1234,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self.part, self.batch, self.epoch = parts.use(rank), batch, 0
        self._seed, self._shuffle, self._collate, self._rank, self._size = seed, shuffle, collate, rank, len(parts)
        mine = deal([len(parts.use(part)) for part in range(len(parts))]) == rank
        self._ends = np.minimum(np.arange(0, len(mine) + batch, batch), len(mine))  # of the batches of all ranks
        self._mine = np.concatenate([[0], np.cumsum(mine)])[self._ends]  # and of this rank's part of them

    def __len__(self) -> int:
        """The number of steps of an epoch, the same on every rank."""
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._steps(epoch)

    def _steps(self, epoch: int) -> Iterator[tuple[Any, ...]]:
        order = np.arange(len(self.part))
        if self._shuffle:
            order = np.random.RandomState([self._seed, epoch, self._rank]).permutation(order)
        for step, total in enumerate(np.diff(self._ends).tolist()):
            chosen = order[self._mine[step] : self._mine[step + 1]].tolist()
            # Without an item of its own, the rank takes another one, whose weight is 0.
            items = [self.part[at] for at in chosen] or [self.part[0] if len(self.part) else self.part.data[0]]
            batch = self._collate(items)
            several = isinstance(items[0], tuple | list) and isinstance(batch, tuple | list)
            fields = batch if several else (batch,)
            yield (*fields, len(chosen) * self._size / total)
