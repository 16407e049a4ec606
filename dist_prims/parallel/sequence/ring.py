"""Ring attention: every rank keeps its queries; the keys and values of all ranks go round a ring.

Gathering all keys would take the memory that splitting the sequence saves. Here each rank computes its queries against
the block of keys and values that it has, while that block is sent to the next rank and another one is received from the
rank before. Outputs of blocks are merged with the logarithms of their denominators, so the result is exact. The
backward goes round once more; the gradients of keys and values travel behind the block that they belong to, accumulate
each rank's share, and arrive at its owner in the last step. Where no fused kernel fits, keys and values go round twice
in the backward, see ``mean`` in ``kernels.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..first_order_only import once
from .argument_checks import AttentionCall, Tensors, agree, lowered, uncompiled
from .jagged import dense, laid_out, like
from .kernels import Mean, Tensor, choose, merge
from .layout import Piece, SequenceLayout
from .ring_step import Hop

__all__: list[str] = []


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    group: dist.ProcessGroup | None = None,
    order: str = "contiguous",
    enable_gqa: bool = False,
    lengths: Sequence[int] | torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Attention of this rank's tokens to the whole sequence, (batch, heads, tokens, features) as in
    ``scaled_dot_product_attention``.

    >>> q, k, v = torch.randn(3, 1, 2, 8, 4)
    >>> output = ring_attention(q, k, v, causal=True, order="zigzag")
    >>> torch.allclose(output, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-6)
    True

    Rank r passes its part from ``split_sequence`` in the same ``order``; with ``causal`` "zigzag" shares the work
    evenly. ``enable_gqa``: several heads of queries share one of keys. ``lengths``: how long each sequence of a padded
    batch is, in tokens of the whole; the output for padding is 0. Jagged nested tensors of sequences that were split
    one by one are taken too.
    """
    options = {"causal": causal, "scale": scale, "order": order, "enable_gqa": enable_gqa, "dropout_p": dropout_p}
    return uncompiled(_ring)(AttentionCall.of("ring_attention", group, lengths, options), (q, k, v))


def _ring(call: AttentionCall, tensors: Tensors) -> torch.Tensor:
    tensors = lowered(tensors)
    call = agree(call, tensors)
    layout = laid_out(call, tensors[0])
    group = call.group if call.group.size() > 1 else None
    plan = Plan(layout, call.group.rank(), call.causal, call.scale or 0.0, group)
    output = attend(plan, *(dense(each, layout.width) for each in tensors))
    return like(output, tensors[0])


@dataclass(frozen=True)
class Plan:
    """A rank's part of the computation. Without a group nothing is sent: the layout is of one rank."""

    layout: SequenceLayout
    rank: int
    causal: bool
    scale: float
    group: dist.ProcessGroup | None

    def pieces(self, step: int) -> list[Piece]:
        """The calls of a kernel with the block that is here at this step."""
        return self.layout.pieces(self.rank, (self.rank - step) % self.layout.size, self.causal)


def attend(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks.

    >>> x = torch.randn(1, 1, 4, 2)
    >>> attend(Plan(SequenceLayout(1, "contiguous", (4,)), 0, False, 1.0, None), x, x, x).shape
    torch.Size([1, 1, 4, 2])
    """
    output: torch.Tensor = _Attention.apply(q, k, v, plan)  # type: ignore[no-untyped-call]
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> torch.Tensor:
        kernel = choose(q, k, v, plan.causal)
        output = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=_wide(q))
        logs = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float64 if kernel.mean else _wide(q))
        for step, keys, values in _passing(plan, k, v):
            for rows, queries, seen, causal in plan.pieces(step):
                block = keys[rows, :, seen], values[rows, :, seen]
                part = kernel.forward(q[rows, :, queries], *block, causal, plan.scale)
                merge(output[rows, :, queries], logs[rows, :, queries], *part)
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, None if kernel.mean else output, logs)
        ctx.plan, ctx.kernel = plan, kernel
        return output

    @staticmethod
    @once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        q, k, v, output, logs = ctx.saved_tensors
        plan: Plan = ctx.plan
        if ctx.kernel.mean:
            output = _mean_gradient(plan, ctx.kernel.mean, grad, q, k, v, logs)
        of_q = torch.zeros_like(q, dtype=_wide(q))
        of_block = k.new_zeros(k.numel() + v.numel(), dtype=_wide(q))
        spare: torch.Tensor | None = None
        behind: Hop | None = None  # the transfer of the gradients of the current block
        for step, keys, values in _passing(plan, k, v):
            shares = []
            for rows, queries, seen, causal in plan.pieces(step):
                asked = [each[rows, :, queries] for each in (grad, q, output, logs)]
                block = keys[rows, :, seen], values[rows, :, seen]
                share, *others = ctx.kernel.backward(*asked[:2], *block, *asked[2:], causal, plan.scale)
                of_q[rows, :, queries] += share
                shares.append(others)
            if behind:
                of_block, spare = behind.arrived(), of_block
            of_keys, of_values = _unpack(of_block, k, v)
            for (rows, _, seen, _), (of_k, of_v) in zip(plan.pieces(step), shares, strict=True):
                of_keys[rows, :, seen] += of_k
                of_values[rows, :, seen] += of_v
            behind = Hop(of_block, plan.group, spare) if plan.group else None
        of_keys, of_values = _unpack(behind.arrived() if behind else of_block, k, v)
        return of_q.to(q.dtype), of_keys.to(k.dtype), of_values.to(v.dtype), None


def _mean_gradient(plan: Plan, mean: Mean, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, logs: Tensor) -> Tensor:
    """What a kernel with ``mean`` takes in place of the output."""
    total = q.new_zeros(*q.shape[:-1], 1, dtype=_wide(q))
    for step, keys, values in _passing(plan, k, v):
        for rows, queries, seen, causal in plan.pieces(step):
            of_grad, of_q, of_logs = (each[rows, :, queries] for each in (grad, q, logs))
            part = mean(of_grad, of_q, keys[rows, :, seen], values[rows, :, seen], of_logs, causal, plan.scale)
            total[rows, :, queries] += part
    return total


def _passing(plan: Plan, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """The blocks of all ranks, this rank's first. While the caller computes with one, it is sent on."""
    if plan.group is None:
        yield 0, k, v
        return
    block = torch.cat([k.reshape(-1), v.reshape(-1)])  # one message
    spare: torch.Tensor | None = None
    for step in range(plan.layout.size - 1):
        hop = Hop(block, plan.group, spare)
        yield step, *_unpack(block, k, v)
        block, spare = hop.arrived(), block
    yield plan.layout.size - 1, *_unpack(block, k, v)


def _unpack(block: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return block[: k.numel()].view(k.shape), block[k.numel() :].view(v.shape)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
