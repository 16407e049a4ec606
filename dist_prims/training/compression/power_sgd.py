"""PowerSGD: the gradient of a matrix as the product of two thin ones (Vogels, Karimireddy and Jaggi, 2019).

    M: what is to be sent, m x n        rank 0        rank 1
    P = M Q             m x r             P0            P1      all_reduce: the mean
    P orthogonal                          the same on both
    Q = M^T P           n x r             Q0            Q1      all_reduce: the mean
    P Q^T               m x n             the same on both, and M - P Q^T is lost till the next step

One step of the power iteration a training step is enough, since Q begins where the last step's ended. Both steps are
linear in M, so an all_reduce adds what is encoded; the bytes do not grow with the number of ranks.

The last products are computed by each rank from the same bits: they are the same on all where ranks have the same kind
of processor, the same torch and as many threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...collectives.flat import cut
from .compressor import Bucket
from .stages import Staged, wide

__all__: list[str] = []


class PowerSGD(Staged):
    """A matrix is sent as two factors of ``rank`` columns. Vectors, and matrices that would not shrink, as they are.

    The first ``warm_up`` steps are not compressed: early gradients are not of a low rank. A tensor of more dimensions
    is the matrix of its first dimension and all others. ``seed`` draws the first Q, which is the same on all ranks.
    ``feedback``: what a message lacks is added to the next gradient.

    >>> PowerSGD(rank=2).saves(64, 32), PowerSGD(rank=2).saves(4, 3)
    (True, False)
    """

    options = ("rank", "warm_up", "seed")

    def __init__(self, rank: int = 4, *, warm_up: int = 100, seed: int = 0, feedback: bool = True) -> None:
        if rank < 1 or warm_up < 0:
            raise ValueError(f"PowerSGD(rank={rank}, warm_up={warm_up}): at least rank 1, and 0 or more steps")
        super().__init__(feedback=feedback)
        self.rank, self.warm_up, self.seed = rank, warm_up, seed
        self._steps: dict[int, int] = {}  # of each bucket since the last reset()
        self._steps_before = 0  # before the last reset()
        self._starts: dict[tuple[int, int], torch.Tensor] = {}  # by bucket and matrix: the Q of the next step

    def reset(self) -> None:
        """Forget what was lost and where the iteration stands; the steps of warm-up that are done stay done."""
        super().reset()
        self._steps_before = max(self._steps.values(), default=self._steps_before)
        self._steps, self._starts = {}, {}

    def restart(self) -> None:
        """Begin as a new compressor, with the warm-up."""
        self.reset()
        self._steps_before = 0

    def saves(self, rows: int, columns: int) -> bool:
        """Whether a matrix has more elements than what is sent for it."""
        return (rows + columns) * self.rank < rows * columns

    def stages(self, bucket: Bucket, group: dist.ProcessGroup | None, size: int) -> Iterator[Any]:
        """See ``Staged.stages``."""
        # 1. The first steps are sent whole: their gradients change too fast for an approximation.
        self._steps[bucket.index] = self._steps.get(bucket.index, self._steps_before) + 1
        corrected = wide(bucket.flat)
        if self._steps[bucket.index] <= self.warm_up:
            yield self._sum(corrected, group, size)
            bucket.flat.copy_(corrected.div_(size))
            return
        # 2. Project each matrix on the start, which is the right factor of the step before, and sum the left factors.
        self.feedback.add(bucket.index, corrected)
        matrices, rest = self._parts(bucket, corrected)
        starts = [self._start(bucket.index, number, matrix) for number, matrix in enumerate(matrices)]
        first = [matrix @ start for matrix, start in zip(matrices, starts, strict=True)] + rest
        joined = torch.cat([each.reshape(-1) for each in first])
        yield self._sum(joined, group, size)

        # 3. Make the columns of the left factors orthogonal, and sum the right factors.
        for vector, mean in zip(first, cut(joined.div_(size), [each.numel() for each in first]), strict=True):
            vector.copy_(mean.view_as(vector))  # what is not compressed is done, and nothing of it lost
        lefts = [torch.linalg.qr(left).Q for left in first[: len(matrices)]]
        rights = [matrix.T @ left for matrix, left in zip(matrices, lefts, strict=True)]
        if rights:
            joined = torch.cat([right.reshape(-1) for right in rights])
            yield self._sum(joined, group, size)

        # 4. Multiply the factors. What the product lacks is added to the gradient of the next step.
        sent = corrected.clone()
        parts = cut(joined.div_(size), [right.numel() for right in rights]) if rights else []
        for number, (left, part, out) in enumerate(zip(lefts, parts, self._parts(bucket, sent)[0], strict=True)):
            right = part.view(-1, self.rank)
            torch.matmul(left, right.T, out=out)
            finite = right.isfinite().all()  # the next step must not begin with NaN; no wait for the device
            self._starts[bucket.index, number] = torch.where(finite, right, starts[number])
        self.feedback.keep(bucket.index, corrected, sent)
        bucket.flat.copy_(sent)

    def _parts(self, bucket: Bucket, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The matrices to be compressed, and what is between them, as views of ``flat``, which has the same layout.

        A matrix has as many rows as the outermost dimension in memory is long, so that none is copied.
        """
        matrices, rest, end = [], [], 0
        origin = bucket.flat.storage_offset()
        for view in sorted(bucket.views, key=torch.Tensor.storage_offset):
            if view.dim() > 1 and view.numel():
                begin, rows = int(view.storage_offset() - origin), view.size(view.stride().index(max(view.stride())))
                if self.saves(rows, view.numel() // rows):
                    rest.append(flat[end:begin])
                    end = begin + view.numel()
                    matrices.append(flat[begin:end].view(rows, -1))
        return matrices, [*rest, flat[end:]]

    def _start(self, index: int, number: int, matrix: torch.Tensor) -> torch.Tensor:
        """The start of the iteration of a matrix: its last result, or random numbers that are the same on all ranks."""
        if (index, number) not in self._starts:
            generator = torch.Generator().manual_seed(self.seed + 1_000_003 * index + number)
            self._starts[index, number] = torch.randn(matrix.shape[1], self.rank, generator=generator).to(matrix)
        return self._starts[index, number]

    def _sum(self, tensor: torch.Tensor, group: dist.ProcessGroup | None, size: int) -> Any:
        self.sent_bytes += 2 * (size - 1) * tensor.nbytes // size
        return dist.all_reduce(tensor, group=group, async_op=True)
