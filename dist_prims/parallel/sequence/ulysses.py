"""Ulysses attention: each rank computes some of the heads over the whole sequence.

One all-to-all replaces (all heads, tokens of this rank) by (heads of this rank, all tokens), and another brings the
output back; between them the attention is ordinary. It sends fewer messages than a ring, but there can be at most as
many ranks as heads of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from .argument_checks import AttentionCall, agree, uncompiled
from .kernels import Tensors
from .ring import attend
from .split import places, rows_to_ranks

__all__: list[str] = []


def ulysses_attention(
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
    """The same as ``ring_attention``, with the same arguments, by splitting heads.

    The number of ranks must divide the number of heads of queries and the number of heads of keys.

    >>> q, k, v = torch.randn(3, 1, 2, 8, 4)
    >>> output = ulysses_attention(q, k, v, causal=True)
    >>> torch.allclose(output, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-6)
    True
    """
    call = AttentionCall("ulysses_attention", group, causal, scale, order, enable_gqa, lengths)
    return uncompiled(_ulysses)(call, (q, k, v))


def _ulysses(call: AttentionCall, tensors: Tensors) -> Tensor:
    call, (q, k, v) = agree(call, tensors)
    size, width = call.group.size(), q.shape[2]
    # 1. From all heads of this rank's tokens to this rank's heads of all tokens; q, k and v in one message.
    by_rank = [x.unflatten(1, (size, x.shape[1] // size)).movedim(1, 0) for x in (q, k, v)]
    received = rows_to_ranks(torch.cat([x.flatten(1) for x in by_rank], 1), call.group)
    parts = received.split([x[0].numel() for x in by_rank], 1)
    heads = [part.view(x.shape).movedim(0, 2).flatten(2, 3) for part, x in zip(parts, by_rank, strict=True)]
    # 2. An ordinary attention, with the tokens in the order of the sequence.
    plain = replace(call, group=None, order="contiguous")
    if call.order == "contiguous":
        output = attend(plain, *heads)
    else:
        place = places(size, width, call.order)
        sequence = place.argsort()
        output = attend(plain, *(x.index_select(2, sequence) for x in heads)).index_select(2, place)
    # 3. The output goes back to the ranks of its tokens.
    return rows_to_ranks(output.unflatten(2, (size, width)).movedim(2, 0), call.group).movedim(0, 1).flatten(1, 2)
