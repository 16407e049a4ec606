"""Splitting and joining of sequences: the part of each rank, its positions, and the whole on every rank.

Gradients are gradients of the sum of the losses of all ranks. So the gradients of a joined sequence are summed over the
ranks. A split is a selection of tokens: its gradient is zero for the tokens that other ranks have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...agreement import check_same
from .argument_checks import refuse_second_derivative, uncompiled
from .layout import ORDERS, chunks

__all__: list[str] = []


def sequence_positions(length: int, group: dist.ProcessGroup | None = None, order: str = "contiguous") -> torch.Tensor:
    """The positions of this rank's tokens in a sequence of ``length``.

    With 2 ranks, 8 tokens and "zigzag" rank 0 has [0, 1, 6, 7] and rank 1 has [2, 3, 4, 5].

    >>> sequence_positions(4)
    tensor([0, 1, 2, 3])
    """
    _check("sequence_positions", group, order)
    own = chunks(length, dist.get_world_size(group), order, dist.get_rank(group))
    return torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in own])


def split_sequence(
    x: torch.Tensor, dim: int = 1, group: dist.ProcessGroup | None = None, order: str = "contiguous"
) -> torch.Tensor:
    """This rank's tokens of a sequence that every rank has whole.

    >>> split_sequence(torch.arange(8).view(1, 8))
    tensor([[0, 1, 2, 3, 4, 5, 6, 7]])
    """
    size = dist.get_world_size(group)
    _check("split_sequence", group, order, x.shape[dim], size)
    own = chunks(x.shape[dim], size, order, dist.get_rank(group))
    return torch.cat([x.narrow(dim, chunk.start, len(chunk)) for chunk in own], dim)


def join_sequence(
    x: torch.Tensor, dim: int = 1, group: dist.ProcessGroup | None = None, order: str = "contiguous"
) -> torch.Tensor:
    """Join the parts of all ranks, which must be equally long: every rank gets the whole sequence.

    Every rank must run the backward, even one whose own loss needs nothing of it: add ``0 * joined.sum()`` there.

    >>> join_sequence(torch.arange(8).view(1, 8)).shape
    torch.Size([1, 8])
    """
    _check("join_sequence", group, order, x.shape[dim])
    return uncompiled(_join)(x, dim, group, order)


def _join(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None, order: str) -> torch.Tensor:
    text = f"join_sequence({tuple(x.shape)}, {x.dtype}, dim={dim}, order={order!r})"
    check_same(text, "Every rank must have a part of equal length", group)
    size = dist.get_world_size(group)
    parts = rows_to_ranks(x.expand(size, *x.shape), group)  # its gradient is summed over the ranks
    return torch.cat(parts.unbind(), dim).index_select(dim, places(size, x.shape[dim], order).argsort().to(x.device))


def places(size: int, width: int, order: str) -> torch.Tensor:
    """The positions of the tokens of all ranks, rank by rank, with ``width`` tokens on each.

    >>> places(2, 4, "zigzag")
    tensor([0, 1, 6, 7, 2, 3, 4, 5])
    """
    held = [chunk for rank in range(size) for chunk in chunks(size * width, size, order, rank)]
    return torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in held])


class _RowsToRanks(torch.autograd.Function):
    """An all-to-all: row r goes to rank r, and a row from rank r replaces it. Gradients travel the opposite way."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(data, memory_format=torch.contiguous_format)
        if data.numel():
            dist.all_to_all_single(received, data.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        refuse_second_derivative()
        return rows_to_ranks(grad, ctx.group), None


rows_to_ranks: Callable[[torch.Tensor, dist.ProcessGroup | None], torch.Tensor] = _RowsToRanks.apply


def _check(name: str, group: dist.ProcessGroup | None, order: str, length: int = 0, chunks_here: int = 1) -> None:
    """Raise ValueError for a rank outside the group, an unknown order, or a length that does not divide into chunks."""
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group of this {name}")
    if order not in ORDERS:
        raise ValueError(f"order={order!r}; choose {' or '.join(map(repr, ORDERS))}")
    if length % (count := ORDERS[order] * chunks_here):
        raise ValueError(
            f"{name}: {length} tokens do not divide into {count} chunks (order={order!r}); pad the sequence"
        )
