"""Ulysses attention: tokens are exchanged for heads, so that each rank computes some heads over the whole sequence.

One all-to-all takes (all heads, tokens of this rank) to (heads of this rank, all tokens), and one brings the output
back; between them attention is an ordinary one. It needs fewer messages than a ring, but at most as many ranks as heads
of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..first_order_only import once
from .argument_checks import AttentionCall, Tensors, agree, lowered, uncompiled
from .jagged import dense, laid_out, like
from .layout import ORDERS, SequenceLayout
from .ring import Plan, attend
from .ring_step import finish

__all__: list[str] = []


def ulysses_attention(
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
    """The same as ``ring_attention``, by splitting heads; the ranks must divide both numbers of heads.

    >>> q, k, v = torch.randn(3, 1, 2, 8, 4)
    >>> output = ulysses_attention(q, k, v, causal=True)
    >>> torch.allclose(output, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-6)
    True
    """
    options = {"causal": causal, "scale": scale, "order": order, "enable_gqa": enable_gqa, "dropout_p": dropout_p}
    return uncompiled(_ulysses)(AttentionCall.of("ulysses_attention", group, lengths, options), (q, k, v))


def _ulysses(call: AttentionCall, tensors: Tensors) -> torch.Tensor:
    tensors = lowered(tensors)
    call = agree(call, tensors)
    layout = laid_out(call, tensors[0])
    whole = SequenceLayout(1, "contiguous", layout.lengths, layout.padded)  # all tokens of a rank's heads
    plan = Plan(whole, 0, call.causal, call.scale or 0.0, None)
    heads = _to_heads([dense(each, layout.width) for each in tensors], call.group)
    if layout.padded is not None and layout.order == "contiguous":  # the tokens arrive in order
        output = attend(plan, *heads)
    else:
        there, back = _places(layout, whole.width, heads[0].device)
        output = _reordered(attend(plan, *(_reordered(each, there) for each in heads)), back)
    return like(_to_tokens(output, call.group), tensors[0])


def _to_heads(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Exchange all heads of some tokens for some heads of all tokens, rank by rank; all tensors in one message."""
    size = group.size()
    by_rank = [each.reshape(len(each), size, each.shape[1] // size, *each.shape[2:]).movedim(1, 0) for each in tensors]
    sent = torch.cat([each.flatten(1) for each in by_rank], 1)
    parts = torch.split(_exchange(sent, group), [each[0].numel() for each in by_rank], 1)
    return [part.view(each.shape).movedim(0, 2).flatten(2, 3) for part, each in zip(parts, by_rank, strict=True)]


def _to_tokens(output: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    batch, heads, tokens, features = output.shape
    by_rank = output.reshape(batch, heads, group.size(), tokens // group.size(), features).movedim(2, 0)
    return _exchange(by_rank, group).movedim(0, 1).flatten(1, 2)


def _places(layout: SequenceLayout, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The place of each token of a sequence among those of all ranks, and the inverse.

    With sequences of one length one row of each stands for all. The numbers are those of ``layout.chunks_of``, computed
    for all ranks at once.
    """
    of_one = len(set(layout.lengths)) == 1
    lengths = torch.tensor(layout.lengths[:1] if of_one else layout.lengths, dtype=torch.int64, device=device)
    lengths = lengths.unsqueeze(1)
    cut = lengths.clamp(min=1) if layout.padded is None else max(layout.padded, 1)
    count = ORDERS[layout.order] * layout.size
    token = torch.arange(width, device=device)
    chunk = ((token + 1) * count - 1) // cut  # the first chunk that ends behind the token
    rank = chunk.minimum(count - 1 - chunk) if layout.order == "zigzag" else chunk
    before = torch.where(chunk == rank, 0, (rank + 1) * cut // count - rank * cut // count)  # the rank's early chunk
    place = rank * layout.width + before + token - chunk * cut // count
    total = layout.size * layout.width
    back = lengths.clamp(max=max(width - 1, 0)).repeat(1, total + 1)  # padding is read from behind the sequence
    back.scatter_(1, torch.where(token < lengths, place, total), token.expand(len(lengths), -1))
    return torch.where(token < lengths, place, 0), back[:, :total]


def _reordered(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    if len(places) == 1:
        return x.index_select(2, places[0])
    rows = torch.arange(len(places), device=x.device).unsqueeze(1)
    return x.transpose(1, 2)[rows, places].transpose(1, 2)


def _exchange(data: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if group.size() == 1:
        return data
    exchanged: torch.Tensor = _Exchange.apply(data, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    """Row r goes to rank r, and the row of rank r comes in its place; so do the gradients."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        data = data.contiguous()
        exchanged = torch.empty_like(data)
        if data.numel():
            work = dist.all_to_all_single(exchanged, data, group=group, async_op=True)
            finish(work, group, data.device)
        return exchanged

    @staticmethod
    @once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Exchange.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]
