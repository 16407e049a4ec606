"""The mean in two exchanges of encoded pieces: all_to_all, sum, all_gather.

To add in a low precision loses bits with every rank, and float16 overflows. Here each rank encodes its gradient and
sends piece r to rank r, which decodes what it gets, adds in float32 in the order of the ranks, divides, and sends the
mean, encoded once more, to all. The bytes are as many as a ring's, 2(n-1)/n of the encoded gradient, and everything is
rounded twice however many ranks there are. (A quantised ring rounds every partial sum: n times, in n-1 steps that wait
for each other.) What the second rounding loses is kept by the rank that lost it (DoubleSqueeze, Tang et al. 2019).

Messages are bytes, so that every backend carries them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from ...agreement import gather_rows
from .compressor import Bucket
from .stages import Staged, wide

__all__: list[str] = []


class EncodedMean(Staged):
    """A compressor whose subclasses encode rows of values as rows of bytes, and decode them."""

    @abstractmethod
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of float32 or float64 as rows of uint8."""

    @abstractmethod
    def decode(self, packed: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows of ``width`` values from the bytes of :meth:`encode`."""

    def width(self, count: int) -> int:
        """The length of a piece of at least ``count`` elements."""
        return count

    def stages(self, bucket: Bucket, group: dist.ProcessGroup | None, size: int) -> Iterator[Any]:
        """See ``Staged.stages``."""
        # 1. Send piece r to rank r.
        count, width = bucket.flat.numel(), self.width(-(-bucket.flat.numel() // size))
        corrected = self.feedback.add((bucket.index, "gradient"), wide(bucket.flat))
        padded = pad(corrected, (0, size * width - count)) if count < size * width else corrected
        leaving = self.encode(padded.view(size, width))
        arriving = torch.empty_like(leaving)
        work = dist.all_to_all_single(arriving, leaving, group=group, async_op=True)
        self.sent_bytes += (size - 1) * leaving.shape[1]
        if self.feedback.enabled:  # during the transfer
            lost = self.decode(leaving, width, corrected.dtype).view(-1)[:count]
            self.feedback.keep((bucket.index, "gradient"), corrected, lost)
        yield work
        # 2. Add the ranks' pieces of this rank's number, and send the mean to all ranks.
        mean = self.decode(arriving[:1], width, corrected.dtype)
        for rank in range(1, size):
            mean += self.decode(arriving[rank : rank + 1], width, corrected.dtype)
        mean = self.feedback.add((bucket.index, "mean"), mean.div_(size))
        mine = self.encode(mean)
        gathered, work = gather_rows(mine.view(-1), group)
        self.sent_bytes += (size - 1) * mine.numel()
        if self.feedback.enabled:
            self.feedback.keep((bucket.index, "mean"), mean, self.decode(mine, width, corrected.dtype))
        yield work
        # 3. The means of all pieces.
        bucket.flat.copy_(self.decode(gathered, width, corrected.dtype).view(-1)[:count])
