"""Part a data set among ranks: every item in exactly one part, whatever the sizes round to.

The order is drawn from ``numpy.random.RandomState``, whose stream NumPy has promised not to change: the same seed gives
the same parts on every rank, on every machine and in ten years. Items are fetched when they are asked for.

>>> parts = DataPartitioner(range(10), sizes=[0.7, 0.3], seed=1)
>>> len(parts.use(0)), len(parts.use(1))
(7, 3)
>>> sorted([*parts.use(0), *parts.use(1)]) == list(range(10))
True
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["DataPartitioner", "Partition"]


class _Items(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Partition:
    """One part of a data set: a data set itself."""

    def __init__(self, data: _Items, indices: NDArray[np.int64]) -> None:
        self.data = data
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.data[int(self.indices[index])]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))


class DataPartitioner:
    """Parts of ``data``, shuffled by ``seed``; ``sizes`` are fractions that add up to 1, or counts to ``len(data)``."""

    def __init__(self, data: _Items, sizes: Sequence[float] = (0.7, 0.2, 0.1), seed: int = 1234) -> None:
        self.data = data
        order = np.random.RandomState(seed).permutation(len(data))
        self._parts = np.split(order, _cuts(len(data), sizes))

    def __len__(self) -> int:
        return len(self._parts)

    def use(self, part: int) -> Partition:
        """The part that belongs to rank ``part``."""
        if not 0 <= part < len(self):
            raise ValueError(f"DataPartitioner: part {part} is asked for; there are {len(self)}, numbered from 0")
        return Partition(self.data, self._parts[part])


def _cuts(count: int, sizes: Sequence[float]) -> list[int]:
    """Where each part but the first begins. Rounding the ends, not the lengths, loses nothing."""
    if not sizes or min(sizes) < 0:
        raise ValueError(f"DataPartitioner: sizes={list(sizes)} must be one or more numbers from 0")
    whole = all(isinstance(size, int | np.integer) for size in sizes)
    total, wanted = math.fsum(sizes), count if whole else 1
    if not math.isclose(total, wanted, rel_tol=1e-6):
        kind = "whole numbers are counts" if whole else "fractions"
        raise ValueError(f"DataPartitioner: sizes={list(sizes)} add up to {total:g}; {kind}: they must make {wanted}")
    ends = np.cumsum(sizes)[:-1]
    return [round(float(end) * count / (total or 1)) for end in ends]
