"""Division of flat tensors into consecutive parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

__all__: list[str] = []


def split_evenly(count: int, parts: int) -> list[int]:
    """Return the lengths of ``parts`` parts of ``count`` elements. The lengths differ by one at most.

    >>> split_evenly(7, 3)
    [2, 2, 3]
    """
    return [(part + 1) * count // parts - part * count // parts for part in range(parts)]


def cut(flat: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Cut a flat tensor into consecutive views of these lengths.

    >>> cut(torch.tensor([1, 2, 3]), [1, 0, 2])
    [tensor([1]), tensor([], dtype=torch.int64), tensor([2, 3])]
    """
    ends = itertools.accumulate(lengths)
    return [flat[end - length : end] for length, end in zip(lengths, ends, strict=True)]
