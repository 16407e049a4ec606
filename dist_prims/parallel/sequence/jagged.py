"""Conversion of nested tensors (sequences of different lengths, each split by itself) to padded blocks and back.

Rank r of n has its share of every sequence, so the ranks have equal work whatever the lengths. Shares
differ by a token where n does not divide a length, and the blocks of a ring must have one length; so all
ranks gather all lengths, and pad to the longest share of any. Nothing is computed for padding.
"""

from __future__ import annotations

import torch

from ...agreement import gather_rows
from .argument_checks import AttentionCall
from .layout import SequenceLayout
from .ring_step import finish

__all__: list[str] = []


def laid_out(call: AttentionCall, q: torch.Tensor) -> SequenceLayout:
    """The layout of the call; the ranks gather the lengths of nested tensors.

    >>> options = {"causal": True, "scale": None, "order": "zigzag", "enable_gqa": False, "dropout_p": 0.0}
    >>> call = AttentionCall.of("ring_attention", None, None, options)
    >>> laid_out(call, torch.ones(2, 1, 8, 4))
    SequenceLayout(size=1, order='zigzag', lengths=(8, 8), padded=8)
    """
    size = call.group.size()
    if not q.is_nested:
        whole = size * q.shape[2]
        return SequenceLayout(size, call.order, call.lengths or (whole,) * q.shape[0], whole)
    mine = q.offsets().diff().to(torch.int64)  # type: ignore[attr-defined]
    rows, work = gather_rows(mine, call.group)
    finish(work, call.group, mine.device)
    layout = SequenceLayout(size, call.order, tuple(rows.sum(0).tolist()))
    for rank, found in enumerate(rows.tolist()):
        due = [sum(stop - start for start, stop in held) for held in layout.chunks_of(rank)]
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
    block = values.new_zeros(batch * width, *values.shape[1:])
    offsets = by_token.offsets()  # type: ignore[attr-defined]
    return (
        block.index_copy(0, padded_positions(offsets, width), values)
        .view(batch, width, *values.shape[1:])
        .transpose(1, 2)
    )


def like(output: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`dense`, where ``tensor`` was nested.

    >>> x = torch.nested.nested_tensor([torch.ones(2, 1, 3), torch.ones(1, 1, 3)], layout=torch.jagged)
    >>> like(dense(x.transpose(1, 2), 2), x.transpose(1, 2)).is_nested
    True
    """
    if not tensor.is_nested:
        return output
    offsets = tensor.offsets()  # type: ignore[attr-defined]
    rows = output.transpose(1, 2).flatten(0, 1)
    values = rows[padded_positions(offsets, output.shape[2])]
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets).transpose(1, 2)


def padded_positions(offsets: torch.Tensor, width: int) -> torch.Tensor:
    """Where each token of a jagged tensor lies in a padded one.

    >>> padded_positions(torch.tensor([0, 2, 3]), 4).tolist()
    [0, 1, 4]
    """
    lengths = offsets.diff()
    row = torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths)
    return torch.arange(len(row), device=offsets.device) - offsets[row] + row * width
