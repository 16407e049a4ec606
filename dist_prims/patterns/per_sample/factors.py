"""Factors of a weight's per-sample gradient, which give its norm without the gradient itself.

The gradient of a matrix is a sum of outer products, one for each position t of a sample: g = sum of left_t right_t^T,
where left is the gradient of the layer's output and right its input. With one position |g| = |left| |right|. With T
positions |g|^2 is the sum over all pairs of positions of (left_t . left_s)(right_t . right_s): two small Gram matrices.
They cost T^2 (R + C) multiplications, and g itself costs T R C; the cheaper way is taken.

>>> part = Matrix(torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[[[3.0, 4.0, 0.0]]]]))
>>> part.gradient()
tensor([[[[3., 4., 0.],
          [6., 8., 0.]]]])
>>> bool(part.squares().isclose(part.gradient().square().sum()))
True
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__: list[str] = []

_BLOCK = 2**24  # elements of gradients that are computed at once


@dataclass
class Matrix:
    """Factors of n samples, g groups, T positions: left (n, g, T, R) and right (n, g, T, C).

    For a convolution ``kernel`` is the number of elements of the kernel. The columns of right are then in the order
    (kernel element, channel), and those of the weight in the order (channel, kernel element).
    """

    left: torch.Tensor
    right: torch.Tensor
    kernel: int = 1

    def squares(self) -> torch.Tensor:
        """For each sample the square of the gradient's norm; a Gram matrix's result below 0 by rounding becomes 0."""
        left, right = _wide(self.left), _wide(self.right)
        positions, rows, columns = left.shape[2], left.shape[3], right.shape[3]
        if positions == 1:
            return (left.square().sum(-1) * right.square().sum(-1)).sum((1, 2))
        if positions * (rows + columns) < rows * columns:
            return ((left @ left.mT) * (right @ right.mT)).sum((1, 2, 3)).clamp_(min=0)
        at_once = max(1, _BLOCK // max(1, left.shape[1] * rows * columns))
        blocks = (slice(begin, begin + at_once) for begin in range(0, len(left), at_once))
        return torch.cat([(left[block].mT @ right[block]).square().sum((1, 2, 3)) for block in blocks])

    def gradient(self) -> torch.Tensor:
        """(n, g, R, C)"""
        product = self.left.mT @ self.right
        split = product.view(*product.shape[:-1], self.kernel, product.shape[-1] // self.kernel)
        return split.transpose(-1, -2).flatten(-2)


@dataclass
class Rows:
    """Factors of an embedding: the rows (n, T) of a table of ``count``, and their gradients (n, T, C)."""

    rows: torch.Tensor
    values: torch.Tensor
    count: int

    def squares(self) -> torch.Tensor:
        """For each sample the square of the gradient's norm, from the sum of each row that occurs in the sample."""
        samples, width = len(self.rows), self.values.shape[-1]
        keys, places = torch.unique(self._keys(), return_inverse=True)
        values = _wide(self.values).reshape(-1, width)
        sums = values.new_zeros(len(keys), width).index_add_(0, places, values)
        return values.new_zeros(samples).index_add_(0, keys // self.count, sums.square().sum(1))

    def gradient(self) -> torch.Tensor:
        """(n, count, C)"""
        samples, width = len(self.rows), self.values.shape[-1]
        table = self.values.new_zeros(samples * self.count, width)
        return table.index_add_(0, self._keys(), self.values.reshape(-1, width)).view(samples, self.count, width)

    def _keys(self) -> torch.Tensor:
        first = torch.arange(len(self.rows), device=self.rows.device) * self.count
        return (self.rows + first.unsqueeze(1)).reshape(-1)


@dataclass
class Plain:
    """The gradient itself, for biases and scales, whose gradients are not larger than an activation."""

    values: torch.Tensor

    def squares(self) -> torch.Tensor:
        return _wide(self.values).square().flatten(1).sum(1)

    def gradient(self) -> torch.Tensor:
        return self.values


Part = Matrix | Rows | Plain


def joined(parts: Sequence[Part]) -> Part | None:
    """The factors of a layer that is used several times, with the positions of all uses; None if the uses are of
    different kinds, as for an embedding that is also the output layer."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if all(isinstance(part, Plain) for part in parts):
        return Plain(torch.stack([part.values for part in parts if isinstance(part, Plain)]).sum(0))
    matrices = [part for part in parts if isinstance(part, Matrix)]
    if len(matrices) == len(parts):
        left, right = [each.left for each in matrices], [each.right for each in matrices]
        return Matrix(torch.cat(left, 2), torch.cat(right, 2), matrices[0].kernel)
    tables = [part for part in parts if isinstance(part, Rows)]
    if len(tables) == len(parts):
        rows, values = [each.rows for each in tables], [each.values for each in tables]
        return Rows(torch.cat(rows, 1), torch.cat(values, 1), tables[0].count)
    return None


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Cast half types to float32: their squares overflow."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
