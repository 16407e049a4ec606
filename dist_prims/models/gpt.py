"""A causal self-attention block and a small GPT around it, for a whole sequence or one that is split among ranks.

Everything in a transformer but attention treats tokens one by one, so splitting the sequence changes two lines: which
attention is called, and which positions a rank's tokens have. Parameters are the same on all ranks; their gradients are
averaged as in data-parallel training. Save ``state_dict()``, not the model: a model refers to its group, which cannot
be saved.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ..parallel.sequence.argument_checks import refuse
from ..parallel.sequence.layout import ORDERS
from ..parallel.sequence.ring import ring_attention
from ..parallel.sequence.split import sequence_positions
from ..parallel.sequence.ulysses import ulysses_attention
from ..torch_compat import default_group

__all__ = ["GPT", "CausalSelfAttention"]

_KINDS = {"ring": ring_attention, "ulysses": ulysses_attention}


class _InGroup(nn.Module):
    """Base of modules whose copies refer to the same group, which cannot be copied."""

    group: dist.ProcessGroup | None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.group)] = self.group
        other = memo[id(self)] = type(self).__new__(type(self))
        other.__setstate__(copy.deepcopy(self.__dict__, memo))  # type: ignore[no-untyped-call]
        return other


class CausalSelfAttention(_InGroup):
    """Every token attends to itself and the tokens before it; input and output are (batch, tokens, width).

    - ``width``: the features of a token. ``heads``: of the queries; they divide ``width``.
    - ``kv_heads``: of keys and values, which several heads of queries share; by default as many as ``heads``.
    - ``attention``: "plain" for the whole sequence, "ring" or "ulysses" for this rank's part of it.
    - ``group``: the ranks that have the parts. ``order``: in which ``split_sequence`` has given them.

    >>> CausalSelfAttention(16, heads=4, kv_heads=2)(torch.randn(1, 5, 16)).shape
    torch.Size([1, 5, 16])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        attention: str = "plain",
        group: dist.ProcessGroup | None = None,
        order: str = "zigzag",
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if attention not in ("plain", *_KINDS):
            raise ValueError(f"attention={attention!r}; choose 'plain', 'ring' or 'ulysses'")
        if order not in ORDERS:
            raise ValueError(f"order={order!r}; choose {' or '.join(map(repr, ORDERS))}")
        if min(heads, kv_heads) < 1 or width % heads or heads % kv_heads:
            raise ValueError(f"width={width}, heads={heads}, kv_heads={kv_heads}: each must be a multiple of the next")
        self.attention, self.group, self.order = attention, group, order
        self._heads = [heads, kv_heads, kv_heads]
        self._features = width // heads
        self.project = nn.Linear(width, sum(self._heads) * self._features)
        self.combine = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).unflatten(-1, (-1, self._features)).transpose(1, 2)
        q, k, v = heads.split(self._heads, 1)
        grouped = q.shape[1] != k.shape[1]
        if self.attention == "plain":
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        else:
            attend = _KINDS[self.attention]
            seen = attend(q, k, v, causal=True, group=self.group, order=self.order, enable_gqa=grouped)
        result: torch.Tensor = self.combine(seen.transpose(1, 2).flatten(2))
        return result


class GPT(_InGroup):
    """Tokens (batch, tokens) to the logits of the next ones.

    - ``vocabulary``: the number of different tokens. ``context``: the tokens of the longest sequence, over all ranks.
    - ``layers``: of attention, each with ``width``, ``heads``, ``kv_heads``, ``attention``, ``group`` and ``order`` as
      :class:`CausalSelfAttention` has them.

    >>> GPT(vocabulary=10, context=8, width=16, heads=4, layers=2)(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 10])

    With "ring" or "ulysses" tokens and targets are this rank's parts, as long as every other's; the mean loss of each
    part and :func:`dist_prims.average_gradients` give the gradient of the whole. All ranks must run the backward.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        width: int,
        heads: int,
        layers: int,
        *,
        kv_heads: int | None = None,
        attention: str = "plain",
        group: dist.ProcessGroup | None = None,
        order: str = "zigzag",
    ) -> None:
        super().__init__()
        self.context, self.attention, self.group, self.order = context, attention, group, order
        self.meaning = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            block = CausalSelfAttention(width, heads, kv_heads=kv_heads, attention=attention, group=group, order=order)
            self.blocks.append(_Block(width, block))
        self.norm = nn.LayerNorm(width)
        self.predict = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.meaning(tokens) + self.place(self._positions(tokens))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.predict(self.norm(x))
        return logits

    def _positions(self, tokens: torch.Tensor) -> torch.Tensor:
        ranks = 1 if self.attention == "plain" else dist.get_world_size(self.group)
        length = tokens.shape[1] * ranks
        if length > self.context:
            problem = f"a sequence of {length} tokens is longer than context={self.context}"
            if self.attention == "plain":
                raise ValueError(f"GPT: {problem}")
            refuse("GPT", problem, self.group or default_group())
        if ranks == 1:
            return torch.arange(length, device=tokens.device)
        return sequence_positions(length, self.group, self.order)


class _Block(nn.Module):
    def __init__(self, width: int, attention: CausalSelfAttention) -> None:
        super().__init__()
        self.attention = attention
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        thought: torch.Tensor = self.think(self.between(x))
        return x + thought
