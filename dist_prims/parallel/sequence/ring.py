"""Ring attention: every rank keeps its queries; the keys and values of all ranks go round a ring.

Gathering all keys would take the memory that splitting the sequence saves. Here a *block* is the keys and values of one
rank. Each rank computes its queries against the block that it has, while it sends that block to the next rank and
receives another block from the rank before. The outputs for all blocks are merged (``kernels.py``), and the result is
exact. In the backward pass the blocks go round once more. The gradients of a block follow it one step behind: each rank
adds its share, and the last step brings them to the owner of the block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import kernels
from .argument_checks import AttentionCall, agree, refuse_second_derivative, uncompiled
from .kernels import Tensors, merge, prepared, wide
from .layout import Piece, SequenceLayout, pieces_of

__all__: list[str] = []


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    group: dist.ProcessGroup | None = None,
    order: str = "contiguous",
    enable_gqa: bool = False,
    lengths: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Attention of this rank's tokens to the whole sequence, (batch, heads, tokens, features) as in
    ``scaled_dot_product_attention``.

    >>> q, k, v = torch.randn(3, 1, 2, 8, 4)
    >>> output = ring_attention(q, k, v, causal=True, order="zigzag")
    >>> torch.allclose(output, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-6)
    True

    Rank r passes its part from ``split_sequence`` in the same ``order``; with ``causal`` "zigzag" shares the work
    evenly. ``enable_gqa``: several heads of queries share one of keys. ``lengths``: how long each sequence of a padded
    batch is, in tokens of the whole; the output for padding is 0.
    """
    call = AttentionCall("ring_attention", group, causal, scale, order, enable_gqa, lengths)
    return uncompiled(_ring)(call, (q, k, v))


def _ring(call: AttentionCall, tensors: Tensors) -> Tensor:
    call, tensors = agree(call, tensors)
    return attend(call, *tensors)


def attend(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks; if ``call.group`` is None, to this rank's keys."""
    size, key_heads = 1 if call.group is None else call.group.size(), k.shape[1]
    # A row of the kernel's batch is a head of keys, with its heads of queries.
    rows = q.flatten(0, 1).unflatten(0, (len(k) * key_heads, q.shape[1] // key_heads))
    flat = prepared(rows, k.flatten(0, 1).unsqueeze(1), v.flatten(0, 1).unsqueeze(1), call.causal)
    lengths = tuple(length for length in call.lengths for _ in range(key_heads))
    layout = SequenceLayout(size, call.order, size * q.shape[2], lengths)
    output: Tensor = _Attention.apply(*flat, call, layout)  # type: ignore[no-untyped-call]
    output = output.unflatten(0, k.shape[:2]).flatten(1, 2)
    return (output if output.shape[3] == v.shape[3] else output[..., : v.shape[3]]).to(q.dtype)


class _Attention(torch.autograd.Function):
    """The attention of all blocks, with ``q``, ``k``, ``v`` as ``kernels.prepared`` returns them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, layout: SequenceLayout) -> Tensor:
        output = torch.zeros_like(q, dtype=wide(q))
        logs = q.new_full(q.shape[:3], -torch.inf, dtype=wide(q))
        for pieces, keys, values in _blocks(call, layout, k, v):
            for rows, queries, seen, causal in pieces:
                block = keys[rows, :, seen], values[rows, :, seen]
                part = kernels.forward(q[rows, :, queries], *block, causal, call.scale)
                merge(output[rows, :, queries], logs[rows, :, queries], *part)
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, logs)
        ctx.call, ctx.layout = call, layout
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        refuse_second_derivative()
        q, k, v, output, logs = ctx.saved_tensors
        grad = grad.contiguous()
        grad_q = torch.zeros_like(q, dtype=wide(q))
        grad_block = k.new_zeros(k.numel() + v.numel(), dtype=wide(k))
        spare: Tensor | None = None  # the buffer of the last hop, whose data was sent: the next hop receives into it
        behind: Hop | None = None  # the transfer of the gradients of the current block
        for pieces, keys, values in _blocks(ctx.call, ctx.layout, k, v):
            # 1. This rank's part of the block's gradients, while the sum of the ranks before arrives.
            parts = []
            for rows, queries, seen, causal in pieces:
                piece_grad, piece_q, piece_output, piece_logs = (x[rows, :, queries] for x in (grad, q, output, logs))
                block = keys[rows, :, seen], values[rows, :, seen]
                grad_queries, *grad_keys_and_values = kernels.backward(
                    piece_grad, piece_q, *block, piece_output, piece_logs, causal=causal, scale=ctx.call.scale
                )
                grad_q[rows, :, queries] += grad_queries
                parts.append(grad_keys_and_values)
            # 2. The sum with this part follows the block to the next rank.
            if behind:
                grad_block, spare = behind.arrived(), grad_block
            grad_keys, grad_values = _unpack(grad_block, k, v)
            for (rows, _, seen, _), (grad_k, grad_v) in zip(pieces, parts, strict=True):
                grad_keys[rows, :, seen] += grad_k
                grad_values[rows, :, seen] += grad_v
            behind = Hop(grad_block, ctx.call.group, spare) if ctx.layout.size > 1 else None
        grad_keys, grad_values = _unpack(behind.arrived() if behind else grad_block, k, v)
        return grad_q.to(q.dtype), grad_keys.to(k.dtype), grad_values.to(v.dtype), None, None


def _blocks(
    call: AttentionCall, layout: SequenceLayout, k: Tensor, v: Tensor
) -> Iterator[tuple[list[Piece], Tensor, Tensor]]:
    """Yield the blocks of all ranks, this rank's block first: the kernel calls with the block, its keys, its values.

    While the caller computes with a block, the block is sent to the next rank.
    """
    if layout.size == 1:
        yield pieces_of(layout, 0, 0, call.causal), k, v
        return
    rank, block = call.group.rank(), torch.cat([k.reshape(-1), v.reshape(-1)])  # one message
    hop: Hop | None = None
    spare: Tensor | None = None  # the buffer of the last hop, whose data was sent: the next hop receives into it
    for step in range(layout.size):
        if hop:
            block, spare = hop.arrived(), block
        hop = Hop(block, call.group, spare) if step < layout.size - 1 else None
        yield pieces_of(layout, rank, (rank - step) % layout.size, call.causal), *_unpack(block, k, v)


def _unpack(block: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return block[: k.numel()].view(k.shape), block[k.numel() :].view(v.shape)


class Hop:
    """A transfer to the next rank and one from the rank before, which begin at once. ``into``: the receive buffer."""

    def __init__(self, data: Tensor, group: dist.ProcessGroup, into: Tensor | None = None) -> None:
        self._data = data  # keeps the memory until it is sent
        self._received = torch.empty_like(data) if into is None else into
        rank, size = group.rank(), group.size()
        send = dist.P2POp(dist.isend, data, group=group, group_peer=(rank + 1) % size)
        receive = dist.P2POp(dist.irecv, self._received, group=group, group_peer=(rank - 1) % size)
        self._works = dist.batch_isend_irecv([send, receive]) if data.numel() else []

    def arrived(self) -> Tensor:
        """Wait for both transfers, and return the tensor from the rank before. The sent tensor may be reused then."""
        for work in self._works:
            work.wait()
        return self._received
