"""Ring attention: a sequence split over the ranks, with the results of the unsplit sequence.

All ranks also compute the unsplit attention for comparison, which a real program never would. The table shows the work
of each rank under a causal mask (pairs of query and key, as a percentage of all), and the number of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from .._console import Console
from ..errors import MismatchError
from ..parallel.sequence import ring_attention, split_sequence, ulysses_attention
from ..parallel.sequence.layout import Piece, SequenceLayout

__all__: list[str] = []

Attention = Callable[..., torch.Tensor]

_BATCH, _KV_HEADS, _FEATURES = 2, 1, 16


def run(console: Console) -> None:
    """Compare every kind of split, forward and backward, with the unsplit attention; then a call that must fail."""
    ranks = dist.get_world_size()
    tokens, heads = 128 * ranks, 2 * ranks
    console.say(f"{tokens} tokens, {tokens // ranks} on each of {ranks} ranks, {heads} heads")
    whole = _tensors(tokens, heads, heads)
    grouped = _tensors(tokens, heads, ranks * _KV_HEADS)
    methods = {"ring": ring_attention, "ulysses": ulysses_attention}
    for name, attention in methods.items():
        for order in ("contiguous", "zigzag"):
            for tensors, what in (
                (whole, "keys for every head"),
                (grouped, "2 query heads a key head"),
            ):
                worst = _difference(attention, tensors, order)
                console.check(worst < 1e-5, f"{name}, {order}, {what}: output and gradients equal the unsplit")
    console.check(_padded_agrees(tokens), "a batch of sequences of different lengths: each as if it were alone")
    console.check(_is_refused(tokens), "parts of different lengths raise MismatchError, and nothing is sent")
    rows = [
        (order, rank, *_work(order, rank, ranks, tokens)) for order in ("contiguous", "zigzag") for rank in range(ranks)
    ]
    console.table(("order", "rank", "causal work, % of all", "blocks computed"), rows)
    shares = [_work("zigzag", rank, ranks, tokens)[0] for rank in range(ranks)]
    console.check(len(set(shares)) == 1, "zigzag: every rank has the same work")


def _tensors(tokens: int, heads: int, kv_heads: int) -> list[torch.Tensor]:
    """q, k, v and a gradient for the output, the same on every rank."""
    torch.manual_seed(0)
    shapes = [(_BATCH, count, tokens, _FEATURES) for count in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape) for shape in shapes]


def _difference(attention: Attention, tensors: list[torch.Tensor], order: str) -> float:
    *whole, grad = [each.clone() for each in tensors]
    whole = [each.requires_grad_() for each in whole]
    single = scaled_dot_product_attention(whole[0], whole[1], whole[2], is_causal=True, enable_gqa=True)
    expected = [single, *torch.autograd.grad(single, whole, grad)]
    mine = [split_sequence(each.detach(), 2, order=order).requires_grad_() for each in whole]
    output = attention(*mine, causal=True, order=order, enable_gqa=True)
    found = [output, *torch.autograd.grad(output, mine, split_sequence(grad, 2, order=order))]
    pairs = zip(found, expected, strict=True)
    return max(float((one - split_sequence(other, 2, order=order)).detach().abs().max()) for one, other in pairs)


def _padded_agrees(tokens: int) -> bool:
    lengths = [tokens, tokens // 3]
    q, k, v, _ = _tensors(tokens, 2, 2)
    mine = [split_sequence(each, 2, order="zigzag") for each in (q, k, v)]
    output = ring_attention(*mine, causal=True, order="zigzag", lengths=lengths)
    alone = torch.zeros_like(q)
    for row, length in enumerate(lengths):
        cut = [each[row, :, :length] for each in (q, k, v)]
        alone[row, :, :length] = scaled_dot_product_attention(cut[0], cut[1], cut[2], is_causal=True)
    return bool((output - split_sequence(alone, 2, order="zigzag")).abs().max() < 1e-5)


def _is_refused(tokens: int) -> bool:
    extra = dist.get_rank() == 1
    q = torch.ones(1, 1, tokens + extra, _FEATURES)
    try:
        ring_attention(q, q, q)
    except MismatchError:
        return True
    return dist.get_world_size() == 1  # one rank agrees with itself


def _work(order: str, rank: int, ranks: int, tokens: int) -> tuple[str, int]:
    layout = SequenceLayout(ranks, order, (tokens,))
    pieces = [piece for keys in range(ranks) for piece in layout.pieces(rank, keys, causal=True)]
    share = sum(map(_area, pieces)) / (tokens * (tokens + 1) / 2)
    return f"{100 * share:.1f}", len(pieces)


def _area(piece: Piece) -> float:
    queries: int = piece.queries.stop - piece.queries.start
    keys: int = piece.keys.stop
    return queries * (queries + 1) / 2 if piece.causal else queries * keys
