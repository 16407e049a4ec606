"""A bucket (gradients sent in one message) and the interface of a compressor of buckets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from ..incremental_reduce import IncrementalSum

__all__: list[str] = []


@dataclass
class Bucket:
    """Gradients of one dtype and device, in one piece of memory.

    >>> flat = torch.arange(6.0)
    >>> bucket = Bucket(0, flat, [flat[:4].view(2, 2), flat[4:]])
    >>> bucket.flat.mul_(2) is flat, bucket.views[0].tolist()
    (True, [[0.0, 2.0], [4.0, 6.0]])
    """

    index: int  # stable over steps while the buckets are not rebuilt: error feedback is kept by it
    flat: torch.Tensor  # 1-D, all gradients of the bucket
    views: list[torch.Tensor]  # those gradients in the shapes of their parameters, views of flat
    incremental: IncrementalSum | None = None  # if the bucket is summed while it fills


class Compressor(Protocol):
    """Turns the gradients of each rank into their mean, in its own way.

    A compressor of one's own, which sends float16 and waits in the end:

    >>> import dist_prims
    >>> class InHalf(Compressor):
    ...     def start(self, bucket, group):
    ...         half = bucket.flat.half() / group.size()
    ...         work = dist.all_reduce(half, group=group, async_op=True)
    ...         def finish():
    ...             work.wait()
    ...             bucket.flat.copy_(half)
    ...         return finish
    ...     def reset(self):
    ...         pass
    >>> model = torch.nn.Linear(2, 1)
    >>> averager = dist_prims.GradientAverager(model, compress=InHalf())
    >>> model(torch.ones(3, 2)).sum().backward()
    >>> model.weight.grad
    tensor([[3., 3.]])
    """

    def start(self, bucket: Bucket, group: dist.ProcessGroup | None) -> Callable[[], None]:
        """Begin to turn ``bucket.flat`` into the mean over the ranks; the callable returned ends it.

        All ranks start the buckets in one order, and end them in one order. But one rank may start a bucket during
        backward and another rank at its end: so the order of collectives must not depend on when this is called, and
        it must not wait for other ranks. The averager uses ``group`` for nothing else.
        """
        ...

    def reset(self) -> None:
        """The buckets were rebuilt: forget what was kept by their index."""
        ...


class Exact:
    """No compression: the sum of gradients that were divided when they were copied into the bucket.

    Dividing first costs nothing there, keeps float16 from overflow, and is what DistributedDataParallel does: so the
    bits are the same.
    """

    def start(self, bucket: Bucket, group: dist.ProcessGroup | None) -> Callable[[], None]:
        if dist.get_world_size(group) == 1:
            return _nothing
        work = dist.all_reduce(bucket.flat, group=group, async_op=True)
        return lambda: _wait(work)

    def reset(self) -> None:
        """Nothing is kept."""


def _nothing() -> None:
    """A single rank has nothing to wait for."""


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
