"""Sender of the buckets of a model: collects gradients, and sends each full bucket.

A bucket is sent when all its gradients have arrived *and* all buckets before it have been sent: the collectives must
have the same order on all ranks, but the gradients may arrive in another order on each rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist

from ...tracing import format as fmt
from ...tracing import recorder
from ...tracing.session import begin_trace_of_environment
from ..compression.compressor import Compressor, Exact
from ..incremental_reduce import IncrementalSum
from .bucket_layout import BucketLayout, fill_buckets, lay_out, our_backend

__all__: list[str] = []


class BucketSender:
    """The buckets of a model, and which of their gradients have arrived in this backward pass.

    Args:
        parameters: of the model; a parameter has a number, its place here.
        compressor: averages the buckets; ``limit``: bytes of a bucket; ``group``: the ranks.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], compressor: Compressor, limit: int, group: dist.ProcessGroup
    ) -> None:
        self._parameters, self._compressor, self._limit, self._group = parameters, compressor, limit, group
        self.layout = BucketLayout([], [], {})
        self.forget()
        begin_trace_of_environment()

    def follow(self, order: Sequence[int], last: Sequence[int] = ()) -> None:
        """Make the buckets, if they change, and discard the gradients that have arrived.

        Args:
            order: the numbers of the parameters, in the expected order of their gradients.
            last: the numbers of parameters whose buckets are sent after all others.
        """
        members = fill_buckets(self._parameters, order, self._limit) + fill_buckets(self._parameters, last, self._limit)
        if members != self.layout.members:
            # The gradient of a parameter that is in no bucket from now on must not keep the memory of its old bucket.
            for number in {*self.layout.place} - {*order, *last}:
                gradient = self._parameters[number].grad
                self._parameters[number].grad = None if gradient is None else gradient.clone()
            self.layout = BucketLayout([], [], {})  # old buckets go now, or when lay_out() has moved their gradients
            self.layout = lay_out(self._parameters, members, self._group)
            self._compressor.reset()
            if type(self._compressor) is Exact:
                self._sum_incrementally()
        self.forget()

    def _sum_incrementally(self) -> None:
        """Let each bucket finish the sum of the bucket before it while its own gradients arrive."""
        backend, before = our_backend(self._group), None
        for bucket in self.layout.buckets:
            if backend and bucket.flat.device.type == "cpu":
                before = bucket.incremental = IncrementalSum.of(bucket.flat, bucket.views, before, self._limit, backend)

    def forget(self) -> None:
        """Discard the gradients that have arrived."""
        self._missing = [len(numbers) for numbers in self.layout.members]  # of each bucket
        self._streams: list[set[torch.cuda.Stream]] = [set() for _ in self._missing]  # that have written to each bucket
        self._endings: list[Callable[[], object]] = []  # of the buckets that are sent: wait for the mean
        for bucket in self.layout.buckets:
            if bucket.incremental:
                bucket.incremental.forget()

    @property
    def sent(self) -> int:
        """The number of buckets that are sent."""
        return len(self._endings)

    def refuse_shown(self) -> None:
        """Raise RuntimeError if other ranks may have read gradients of a backward pass that has failed."""
        if self.sent or any(each.incremental and each.incremental.is_shown() for each in self.layout.buckets):
            raise RuntimeError(
                f"rank {self._group.rank()}: GradientAverager: the last backward() has raised when other ranks had "
                f"read some of its gradients ({self.sent} of {len(self.layout.buckets)} buckets were sent), and they "
                "wait for the rest; end this process, so that they do not wait until the timeout"
            )

    def has_place(self, number: int) -> bool:
        return number in self.layout.place

    def place(self, number: int) -> torch.Tensor:
        """The part of a bucket for the gradient of a parameter, in its shape."""
        return self.layout.place[number][1]

    def arrive(self, number: int, factor: float) -> bool:
        """Take a complete gradient, times ``factor``; return whether its bucket is full now."""
        index, view = self.layout.place[number]
        parameter, incremental = self._parameters[number], self.layout.buckets[index].incremental
        if incremental and incremental.put(view, parameter.grad, factor):
            parameter.grad = view
        else:
            self.store(number, factor)
        self._missing[index] -= 1
        return not self._missing[index]

    def store(self, number: int, factor: float) -> None:
        """Move a gradient to its place in the bucket, times ``factor``: 1 / size, or 1 if a compressor averages."""
        parameter, (index, view) = self._parameters[number], self.layout.place[number]
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.strided:  # a sparse one is averaged after backward
            view.zero_()
            return
        if gradient is not view or factor != 1.0:
            torch.mul(gradient, factor, out=view)
        parameter.grad = view
        if view.is_cuda:
            self._streams[index].add(torch.cuda.current_stream(view.device))

    def send_full(self) -> None:
        """Send the full buckets in their order.

        A bucket that is summed incrementally is sent when the next one is full: its sum is nearly complete by then.
        """
        # How many buckets are full before the first one that is not.
        full = next((index for index, missing in enumerate(self._missing) if missing), len(self._missing))
        while self.sent < full and (self.sent < full - 1 or not self.layout.buckets[self.sent].incremental):
            self._send()

    def send_rest(self, seen: Collection[int], factor: float, only_zeros: bool) -> None:
        """Send the remaining buckets, at the end of backward.

        Args:
            seen: the numbers of the parameters whose gradients have arrived. Of the others the ``.grad`` from before
                backward is sent, or zeros.
            factor: of the gradients that have not arrived.
            only_zeros: this rank has no data left, and sends zeros.
        """
        while self.sent < len(self._missing):
            for number in self.layout.members[self.sent]:
                if only_zeros:
                    self.place(number).zero_()
                elif number not in seen:
                    self.store(number, factor)
            self._send(is_last=True)

    def wait(self) -> None:
        """Wait until all buckets that are sent are means."""
        for end in self._endings:
            end()

    def scale(self, factor: float) -> None:
        for bucket in self.layout.buckets:
            bucket.flat.mul_(factor)

    def _send(self, is_last: bool = False) -> None:
        """Send the next bucket; ``is_last``: backward has ended, so nothing else is left to do meanwhile."""
        for stream in self._streams[self.sent]:  # a layer may compute on a stream of its own
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        bucket, begin = self.layout.buckets[self.sent], recorder.started()
        if bucket.incremental:
            end: Callable[[], object] = bucket.incremental.send(ahead=not is_last).wait
        else:
            end = self._compressor.start(bucket, self._group)
        self._endings.append(functools.partial(_traced, end, self.sent, bucket.flat.nbytes, begin) if begin else end)


def _traced(end: Callable[[], object], index: int, nbytes: int, begin: int) -> None:
    """Wait for the collective of a bucket, and record the time from its start to its end."""
    end()
    recorder.record(fmt.BUCKET, begin, name=f"bucket {index}", nbytes=nbytes)
