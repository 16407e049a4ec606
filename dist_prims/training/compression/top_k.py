"""Top-k compression: the largest values of a gradient are sent, with their indices; the rest is error feedback.

Each rank chooses its own indices, so an all_reduce does not fit: all indices and values are gathered, and every rank
adds them in the order of the ranks. What a rank sends grows with their number, so this is for few ranks and slow links.

Use an optimizer without momentum: error feedback sends the sum of a hundred steps' gradients at once, and momentum adds
it again in each of the next steps. With momentum 0.9, ten times the rate without momentum is the same step in the long
run. docs/guide.md has figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...agreement import gather_rows
from .compressor import Bucket
from .stages import Staged, wide

__all__: list[str] = []

_SAMPLE = 1 << 16  # elements from which the threshold is estimated
_INT32 = 2**31


class TopK(Staged):
    """The fraction ``ratio`` of a bucket with the largest magnitudes, at least one value of it.

    >>> TopK(ratio=0.25).count(7)
    2
    """

    rounds = 1

    def __init__(self, ratio: float = 0.01, *, feedback: bool = True) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"TopK(ratio={ratio}): a fraction above 0, up to 1")
        super().__init__(feedback=feedback)
        self.fraction = ratio

    def __repr__(self) -> str:
        return f"TopK(ratio={self.fraction}, feedback={self.feedback.enabled})"

    def count(self, elements: int) -> int:
        """How many of them are sent."""
        return math.ceil(self.fraction * elements)

    def stages(self, bucket: Bucket, group: dist.ProcessGroup | None, size: int) -> Iterator[Any]:
        """See ``Staged.stages``."""
        corrected = self.feedback.add(bucket.index, wide(bucket.flat))
        places = largest(corrected, self.count(corrected.numel()))
        index = torch.int32 if corrected.numel() < _INT32 else torch.int64
        values = corrected[places].to(bucket.flat.dtype)
        mine = torch.cat([values.view(torch.uint8), places.to(index).view(torch.uint8)])
        gathered, work = gather_rows(mine, group)
        self.sent_bytes += (size - 1) * mine.numel()
        if self.feedback.enabled:
            sent = torch.zeros_like(corrected).index_copy_(0, places, values.to(corrected.dtype))
            self.feedback.keep(bucket.index, corrected, sent)
        yield work

        mean = corrected.zero_()
        for row in gathered:  # in the order of the ranks; none has a place twice
            of_rank, at = row[: values.nbytes].clone(), row[values.nbytes :].clone()  # aligned for what they hold
            mean.index_add_(0, at.view(index).long(), of_rank.view(values.dtype).to(mean.dtype))
        bucket.flat.copy_(mean.div_(size))


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Where the ``count`` largest magnitudes are, in no order; NaN is the largest of all.

    On a CPU ``topk`` of millions takes long, so it is given only the elements above a threshold, which is estimated
    from a sample: if those are at least ``count`` elements, the largest are among them.

    >>> sorted(largest(torch.tensor([1.0, -3.0, 2.0]), 2).tolist())
    [1, 2]
    """
    sizes = values.abs()
    if values.device.type == "cpu" and values.numel() > 4 * _SAMPLE:
        sample = sizes[:: values.numel() // _SAMPLE]
        guess = min(len(sample), math.ceil(1.3 * len(sample) * count / values.numel()) + 20)
        near = (~(sizes < sample.topk(guess).values[-1])).nonzero().view(-1)  # not "at least": that would lose NaN
        if len(near) >= count:
            return near[sizes[near].topk(count, sorted=False).indices]
    return sizes.topk(count, sorted=False).indices
