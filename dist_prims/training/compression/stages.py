"""Base of all compressors: collectives in stages, launched in one order on all ranks, and counters of bytes.

Compression takes more than one collective, and the second needs the result of the first. A thread, or a callback at the
end of the first, would launch the second at a different place among the other collectives on each rank: the wrong
messages would be paired. Waiting for the first in ``start`` would delay backward, and deadlock where the other rank
waits for this one in a collective of a layer. So a compressor is a generator that yields each collective it has
launched, and the order of the buckets fixes the order of all launches::

    bucket     0  1  0  2  1  3  2  ...        the first collective of a bucket, then the second of the one before it
    stage      1  1  2  1  2  1  2

``start`` of a bucket makes the next launches in this order: those for which it need not wait, if the group is used for
nothing else, or else all of them up to this bucket. The end of a bucket waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ...agreement import check_same
from .compressor import Bucket
from .feedback import Feedback

__all__: list[str] = []


class Staged(ABC):
    """A compressor whose subclasses implement :meth:`stages`.

    ``sent_bytes`` counts what a rank has sent, ``dense_bytes`` what a ring would have sent of the same gradients
    uncompressed; :meth:`ratio` compares the two.
    """

    rounds: ClassVar[int] = 2  # collectives one after the other
    options: ClassVar[tuple[str, ...]] = ()  # the arguments of the class besides ``feedback``

    def __init__(self, *, feedback: bool = True) -> None:
        self.feedback = Feedback(feedback)
        self.sent_bytes = 0
        self.dense_bytes = 0
        self._last: _Job | None = None
        self._next: deque[_Job] = deque()  # the jobs to advance, in their order
        self._waits = True  # whether start() may wait for other ranks
        self._agreed: set[str] = set()

    @abstractmethod
    def stages(self, bucket: Bucket, group: dist.ProcessGroup | None, size: int) -> Iterator[Any]:
        """Turn ``bucket.flat`` into the mean, yielding each work that is to be waited for; ``size`` is 2 or more."""

    def __repr__(self) -> str:
        """The class and its arguments, which must be the same on all ranks."""
        options = "".join(f"{name}={getattr(self, name)}, " for name in self.options)
        return f"{type(self).__name__}({options}feedback={self.feedback.enabled})"

    def start(self, bucket: Bucket, group: dist.ProcessGroup | None) -> Callable[[], None]:
        """Begin to turn ``bucket.flat`` into the mean over the ranks; the callable returned waits and writes it.

        Every rank starts the same buckets in the same order, and ends them in one order, too.
        """
        flat, size = bucket.flat, dist.get_world_size(group)
        self._check(bucket, group)
        if size == 1 or not flat.numel():
            return _nothing
        self.dense_bytes += 2 * (size - 1) * flat.nbytes // size
        job = _Job(self.stages(bucket, group, size))
        before, self._last = self._last, job
        self._next.append(job)
        if before is not None and self.rounds > 1:
            self._next.append(before)
        while self._next and (self._waits or self._next[0].is_ready()):
            self._next.popleft().advance()
        return lambda: self._finish(job)

    def agreed(self) -> None:
        """The ranks have the same compressor and the same buckets, and the group is for nothing else: :meth:`start`
        neither compares them nor waits."""
        self._waits = False

    def reset(self) -> None:
        """Forget the errors of compression: the buckets were rebuilt, or the parameters are others."""
        self.feedback.reset()
        self._agreed.clear()
        self._last = None
        self._next.clear()

    def _finish(self, job: _Job) -> None:
        while self._next and not job.is_done:
            self._next.popleft().advance()
        job.finish()

    def ratio(self) -> float:
        """How many times fewer bytes were sent than without compression; 1 where none were to be sent."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else 1.0

    def _check(self, bucket: Bucket, group: dist.ProcessGroup | None) -> None:
        flat = bucket.flat
        if not flat.is_floating_point():
            raise ValueError(
                f"rank {dist.get_rank(group)}: {self!r} compresses real floating-point gradients, and those of bucket "
                f"{bucket.index} are {flat.dtype}; average that model without compression"
            )
        text = f"{self!r} on bucket {bucket.index} of {flat.numel()} elements of {flat.dtype}"
        if self._waits and text not in self._agreed:  # once a bucket: later steps cost nothing
            check_same(text, "Every rank must make its compressor with the same arguments", group)
            self._agreed.add(text)


class _Job:
    """The collectives of one bucket."""

    def __init__(self, stages: Iterator[Any]) -> None:
        self._stages = stages
        self._work: Any = None
        self._failed: BaseException | None = None
        self.is_done = False

    def is_ready(self) -> bool:
        """Whether :meth:`advance` need not wait."""
        return self._work is None or self._work.is_completed()

    def advance(self) -> None:
        """Wait for the collective that is under way, and go on to the next or to the end."""
        if self._failed is not None:
            raise self._failed
        if self.is_done:
            return
        try:
            if self._work is not None:
                self._work.wait()
            self._work = next(self._stages, None)
        except BaseException as error:
            self._failed = error  # finish() of this bucket must raise, too
            raise
        self.is_done = self._work is None

    def finish(self) -> None:
        while not self.is_done:
            self.advance()


def _nothing() -> None:
    return None


def wide(flat: torch.Tensor) -> torch.Tensor:
    """A tensor in the dtype in which its values are added: half types in float32. Itself where it is wide enough."""
    return flat.to(torch.promote_types(flat.dtype, torch.float32))
