"""Nested tensors at the door: sequences of unlike lengths, each split by itself, laid into a padded block and back.

Rank r of n has its share of every sequence, so the ranks have equal work however unlike the sequences are. Shares
differ by a token where n does not divide a length, and what travels round a ring must be equally long everywhere; so
all ranks learn all lengths, and pad to the longest share of any. Nothing is computed for padding.
"""

from __future__ import annotations

import torch

from ...agreement import gather_rows
from .argument_checks import Call
from .layout import Layout
from .ring_step import finish

__all__ = ["dense", "laid_out", "like", "spots"]


def laid_out(call: Call, q: torch.Tensor) -> Layout:
    """Who holds what; the ranks tell each other if that cannot be seen from one of them.

    >>> options = {"causal": True, "scale": None, "order": "zigzag", "enable_gqa": False, "dropout_p": 0.0}
    >>> call = Call.of("ring_attention", None, None, options)
    >>> laid_out(call, torch.ones(2, 1, 8, 4))
    Layout(size=1, order='zigzag', lengths=(8, 8), padded=8)
    """
    size = call.group.size()
    if not q.is_nested:
        whole = size * q.shape[2]
        return Layout(size, call.order, call.lengths or (whole,) * q.shape[0], whole)
    mine = q.offsets().diff().to(torch.int64)  # type: ignore[attr-defined]
    rows, work = gather_rows(mine, call.group)
    finish(work, call.group, mine.device)
    layout = Layout(size, call.order, tuple(rows.sum(0).tolist()))
    for rank, found in enumerate(rows.tolist()):
        due = [sum(stop - start for start, stop in held) for held in layout.held(rank)]
        if found != due:
            raise ValueError(
                f"rank {call.group.rank()}: {call.name}: rank {rank} has {found} tokens of the sequences of lengths "
                f"{list(layout.lengths)}, where order={call.order!r} gives it {due}; split_sequence() gives them"
            )
    return layout


def dense(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """(batch, heads, width, features), the tokens of each sequence in front.

    >>> x = torch.nested.nested_tensor([torch.ones(2, 1, 3), torch.ones(1, 1, 3)], layout=torch.jagged)
    >>> dense(x.transpose(1, 2), 2)[:, 0, :, 0]
    tensor([[1., 1.],
            [1., 0.]])
    """
    if not tensor.is_nested:
        return tensor
    by_token = tensor.transpose(1, 2)
    values, batch = by_token.values(), tensor.shape[0]
    room = values.new_zeros(batch * width, *values.shape[1:])
    offsets = by_token.offsets()  # type: ignore[attr-defined]
    return room.index_copy(0, spots(offsets, width), values).view(batch, width, *values.shape[1:]).transpose(1, 2)


def like(output: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """What :func:`dense` did, undone, where ``tensor`` was nested.

    >>> x = torch.nested.nested_tensor([torch.ones(2, 1, 3), torch.ones(1, 1, 3)], layout=torch.jagged)
    >>> like(dense(x.transpose(1, 2), 2), x.transpose(1, 2)).is_nested
    True
    """
    if not tensor.is_nested:
        return output
    offsets = tensor.offsets()  # type: ignore[attr-defined]
    rows = output.transpose(1, 2).flatten(0, 1)
    values = rows[spots(offsets, output.shape[2])]
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets).transpose(1, 2)


def spots(offsets: torch.Tensor, width: int) -> torch.Tensor:
    """Where each token of a jagged tensor lies in a padded one.

    >>> spots(torch.tensor([0, 2, 3]), 4).tolist()
    [0, 1, 4]
    """
    lengths = offsets.diff()
    row = torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths)
    return torch.arange(len(row), device=offsets.device) - offsets[row] + row * width
