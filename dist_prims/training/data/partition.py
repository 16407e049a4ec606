"""Partition a data set over ranks: every item in exactly one part, however the sizes are rounded.

The order is drawn from ``numpy.random.RandomState``, whose stream NumPy has promised not to change: the same seed gives
the same parts on every rank, on every machine and in ten years. Items are read lazily.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__: list[str] = []


class Items(Protocol):
    """Data that can be partitioned: a data set of PyTorch's map style, a list, a tensor."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Partition:
    """One part of a data set: a data set itself.

    >>> training = DataPartitioner("abcdefghij", sizes=[0.8, 0.2], seed=1).use(0)
    >>> isinstance(training, Partition), len(training), set(training) <= set("abcdefghij")
    (True, 8, True)
    """

    def __init__(self, data: Items, indices: NDArray[np.int64]) -> None:
        self.data = data
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.data[int(self.indices[index])]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))


class DataPartitioner:
    """Parts of ``data``, shuffled by ``seed``; ``sizes`` are fractions that add up to 1, or counts to ``len(data)``.

    ``stratify`` is a label for each item. The parts are as long as without it, and each holds its share of every label:
    of a label's items len(part) / len(data), but for at most 1 + len(sizes) * len(part) / len(data) items.

    ``weights`` is a weight for each item, such as the length of a text. Then the fractions are of the total weight, and
    each part's weight is right to (1 - 1 / len(sizes)) times the heaviest item. Items of no weight go by number.

    >>> even = DataPartitioner(range(6), [0.5, 0.5], stratify=["cat", "dog", "dog", "cat", "dog", "dog"])
    >>> [sorted(item in (0, 3) for item in even.use(part)) for part in (0, 1)]
    [[False, False, True], [False, False, True]]
    >>> fair = DataPartitioner(range(4), [0.5, 0.5], weights=[30, 10, 10, 10])
    >>> sorted(len(fair.use(part)) for part in (0, 1))
    [1, 3]
    """

    def __init__(
        self,
        data: Items,
        sizes: Sequence[float] = (0.7, 0.2, 0.1),
        seed: int = 1234,
        *,
        stratify: ArrayLike | None = None,
        weights: ArrayLike | None = None,
    ) -> None:
        if stratify is not None and weights is not None:
            raise ValueError("DataPartitioner: stratify and weights are both given; choose one")
        self.data = data
        random = np.random.RandomState(seed)
        order: NDArray[np.int64] = random.permutation(len(data))
        cuts = _cuts(len(data), sizes)
        if stratify is not None:
            owners = _by_label(_one_each("stratify", stratify, len(data))[order], cuts)
        elif weights is not None:
            owners = _by_weight(_weights(weights, len(data))[order], sizes)
        else:
            owners = np.repeat(np.arange(len(sizes)), np.diff([0, *cuts, len(data)]))
        self._parts = [order[owners == part] for part in range(len(sizes))]

    def __len__(self) -> int:
        return len(self._parts)

    def use(self, part: int) -> Partition:
        """The part that belongs to rank ``part``."""
        if not 0 <= part < len(self):
            raise ValueError(f"DataPartitioner: there is no part {part}; there are {len(self)}, numbered from 0")
        return Partition(self.data, self._parts[part])


def deal(counts: Sequence[int]) -> NDArray[np.int64]:
    """The part that gets each of sum(counts) items, so that the items of a part are evenly spaced.

    >>> deal([4, 2]).tolist()
    [0, 1, 0, 0, 1, 0]

    Item number j of part p comes at the time (j + 1/2) / counts[p]; so at any time each part is within half an item of
    its share, and any run of items is shared but for 1 + len(counts) * counts[p] / sum(counts) items.
    """
    times = [(np.arange(count) + 0.5) / max(count, 1) for count in counts]
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners[np.argsort(np.concatenate(times), kind="stable")]


def _cuts(count: int, sizes: Sequence[float]) -> list[int]:
    """Where each part but the first begins. Rounding the ends, not the lengths, loses nothing."""
    if len(sizes) == 0 or min(sizes) < 0:
        raise ValueError(f"DataPartitioner: sizes={list(sizes)} must be one or more numbers from 0")
    whole = all(isinstance(size, int | np.integer) for size in sizes)
    total, wanted = math.fsum(sizes), count if whole else 1
    if not math.isclose(total, wanted, rel_tol=1e-6):
        kind = "whole numbers are counts" if whole else "fractions"
        raise ValueError(f"DataPartitioner: sizes={list(sizes)} add up to {total:g}; {kind}: they must make {wanted}")
    ends = np.cumsum(sizes)[:-1]
    return [round(float(end) * count / (total or 1)) for end in ends]


def _one_each(name: str, values: ArrayLike, count: int) -> NDArray[Any]:
    found = np.asarray(values)
    if found.shape != (count,):
        raise ValueError(f"DataPartitioner: {name} has shape {found.shape}; it takes one for each of {count} items")
    return found


def _weights(weights: ArrayLike, count: int) -> NDArray[np.float64]:
    found = _one_each("weights", weights, count).astype(np.float64)
    if not (np.isfinite(found) & (found >= 0)).all():
        raise ValueError("DataPartitioner: weights must be finite numbers from 0")
    return found


def _by_label(labels: NDArray[Any], cuts: list[int]) -> NDArray[np.int64]:
    """Assign the items label by label: any run of items, and so the run of each label, is shared evenly."""
    owners = np.empty(len(labels), dtype=np.int64)
    owners[np.argsort(labels, kind="stable")] = deal(np.diff([0, *cuts, len(labels)]).tolist())
    return owners


def _by_weight(weights: NDArray[np.float64], sizes: Sequence[float]) -> NDArray[np.int64]:
    """Assign the heaviest item first, each to the part that lacks most.

    Why the bound holds, with w the heaviest weight and n parts: what the parts lack is what is left to assign, so an
    item of v <= w goes to a part that lacks at least v/n, and then it is over by at most w (1 - 1/n). And a part that
    lacks d > 0 at the end always lacked as much, so every other part lacks at least d - w; as they sum to 0, d <= w (1
    - 1/n).
    """
    owners = np.empty(len(weights), dtype=np.int64)
    light = np.flatnonzero(weights == 0)
    owners[light] = deal(np.diff([0, *_cuts(len(light), _fractions(sizes)), len(light)]).tolist())
    total = float(weights.sum())
    # A heap of (minus the weight that a part lacks, the part): the part that lacks most comes first.
    excesses = [(-fraction * total, part) for part, fraction in enumerate(_fractions(sizes)) if fraction]
    heapq.heapify(excesses)
    heaviest = np.argsort(-weights, kind="stable")[: len(weights) - len(light)]
    for item, weight in zip(heaviest.tolist(), weights[heaviest].tolist(), strict=True):
        excess, part = excesses[0]
        owners[item] = part
        heapq.heapreplace(excesses, (excess + weight, part))
    return owners


def _fractions(sizes: Sequence[float]) -> list[float]:
    total = math.fsum(sizes) or 1.0
    return [float(size) / total for size in sizes]
