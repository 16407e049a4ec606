"""Splitting and joining of sequences: the part of each rank, its positions, and the whole on every rank.

Gradients are those of the sum of all ranks' losses. So the gradients of a joined sequence are summed over the ranks,
and a split is a selection of tokens: its gradient is zero for the tokens that other ranks have.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

from ...collectives import all_gather, reduce_scatter
from ...torch_compat import has_holes, ragged_dim
from ..first_order_only import once
from .argument_checks import uncompiled
from .layout import ORDERS, chunks

__all__: list[str] = []


def sequence_positions(
    length: int,
    group: dist.ProcessGroup | None = None,
    order: str = "contiguous",
    *,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The positions of this rank's tokens in a sequence of ``length``.

    With 2 ranks, 8 tokens and "zigzag" rank 0 has [0, 1, 6, 7] and rank 1 has [2, 3, 4, 5].

    >>> sequence_positions(4)
    tensor([0, 1, 2, 3])
    """
    own = chunks(length, dist.get_world_size(group), _known(order, group), dist.get_rank(group))
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in own])


def split_sequence(
    x: torch.Tensor, dim: int = 1, group: dist.ProcessGroup | None = None, order: str = "contiguous"
) -> torch.Tensor:
    """This rank's tokens of a sequence that every rank has whole; of a jagged nested tensor its share of each sequence.

    >>> split_sequence(torch.arange(8).view(1, 8))
    tensor([[0, 1, 2, 3, 4, 5, 6, 7]])
    """
    if x.is_nested:
        return _split_each(x, dim, group, order)
    size, length = dist.get_world_size(group), x.shape[dim]
    if length % (ORDERS[_known(order, group)] * size):
        raise ValueError(
            f"rank {dist.get_rank(group)}: split_sequence: {length} tokens do not divide into {ORDERS[order] * size} "
            f"chunks (order={order!r}, {size} ranks); pad the sequence, and give lengths to the attention"
        )
    parts = [x.narrow(dim, start, stop - start) for start, stop in chunks(length, size, order, dist.get_rank(group))]
    return torch.cat(parts, dim)


def join_sequence(
    x: torch.Tensor, dim: int = 1, group: dist.ProcessGroup | None = None, order: str = "contiguous"
) -> torch.Tensor:
    """The whole sequence, on every rank, of equally long parts.

    Every rank must run the backward, even one whose own loss needs nothing of it: add ``0 * joined.sum()`` there.

    >>> join_sequence(torch.arange(8).view(1, 8)).shape
    torch.Size([1, 8])
    """
    if x.is_nested:
        raise ValueError(
            "join_sequence: parts must have equal length; join the sequences of a nested tensor one by one"
        )
    if x.shape[dim] % ORDERS[_known(order, group)]:
        raise ValueError(
            f"rank {dist.get_rank(group)}: join_sequence: {x.shape[dim]} tokens are not two chunks of order {order!r}"
        )
    joined: torch.Tensor = uncompiled(_Join.apply)(x, dim, group, order)
    return joined


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup | None, order: str) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.order = dim, group, order
        parts = list(x.new_empty(dist.get_world_size(group), *x.shape))
        all_gather(parts, x.detach().contiguous(), group)
        ctx.place = _place(len(parts), x.shape[dim], order, x.device)
        return torch.cat(parts, dim).index_select(dim, ctx.place.argsort())

    @staticmethod
    @once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        size = dist.get_world_size(ctx.group)
        parts = [each.contiguous() for each in grad.index_select(ctx.dim, ctx.place).chunk(size, ctx.dim)]
        mine = torch.empty_like(parts[0])
        reduce_scatter(mine, parts, group=ctx.group)
        return mine, None, None, None


def _place(size: int, width: int, order: str, device: torch.device) -> torch.Tensor:
    """The positions of the tokens of all ranks, rank by rank."""
    own = [each for rank in range(size) for each in chunks(size * width, size, order, rank)]
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in own])


def _split_each(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None, order: str) -> torch.Tensor:
    if x.layout != torch.jagged or ragged_dim(x) != dim:
        raise ValueError(
            f"split_sequence: a nested tensor must be made with layout=torch.jagged and have its tokens in dim={dim}"
        )
    if has_holes(x):
        raise ValueError(
            "split_sequence: a nested tensor must have no holes; call x.contiguous() before transposing it"
        )
    by_token = x.transpose(1, dim) if dim != 1 else x
    order = _known(order, group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    begins: list[int] = by_token.offsets().tolist()  # type: ignore[attr-defined]
    mine, offsets = [], [0]
    for begin, end in itertools.pairwise(begins):
        own = chunks(end - begin, size, order, rank)
        mine += [torch.arange(begin + start, begin + stop) for start, stop in own]
        offsets.append(offsets[-1] + sum(stop - start for start, stop in own))
    values = by_token.values()
    chosen = values[torch.cat(mine).to(values.device)]
    split = torch.nested.nested_tensor_from_jagged(chosen, offsets=torch.tensor(offsets, device=values.device))
    return split.transpose(1, dim) if dim != 1 else split


def _known(order: str, group: dist.ProcessGroup | None) -> str:
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group in which the sequence is split")
    if order not in ORDERS:
        raise ValueError(f"order={order!r}; choose {' or '.join(map(repr, ORDERS))}")
    return order
