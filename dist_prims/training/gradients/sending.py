"""The buckets of a model: gradients come in, means come out.

A bucket is sent when every gradient of it is there *and* every bucket before it has been sent: the order of collectives
must be the same on all ranks, while gradients may come in another order on each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist

from .bucket import Compressor
from .layout import Layout, lay_out, plan

__all__ = ["Sending"]


class Sending:
    """The buckets, and how far they are in the backward that runs.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> from .bucket import Exact
    >>> sending = Sending([weight], Exact(), 2**20, dist.group.WORLD)
    >>> sending.follow([0])
    >>> weight.grad = torch.ones(2)
    >>> sending.arrive(0, 0.5)
    >>> sending.send_full()
    >>> sending.wait()
    >>> weight.grad
    tensor([0.5000, 0.5000])
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], compressor: Compressor, limit: int, group: dist.ProcessGroup
    ) -> None:
        self._parameters, self._compressor, self._limit, self._group = parameters, compressor, limit, group
        self.layout = Layout([], [], {})
        self.forget()

    def follow(self, order: Sequence[int]) -> None:
        """Have places for these parameters, in buckets that fill in this order."""
        members = plan(self._parameters, order, self._limit)
        if members != self.layout.members:
            for number in {*self.layout.place} - {*order}:  # its gradient must not keep the memory of a bucket
                gradient = self._parameters[number].grad
                self._parameters[number].grad = None if gradient is None else gradient.clone()
            self.layout = Layout([], [], {})  # its memory goes with the gradients that leave it
            self.layout = lay_out(self._parameters, members, self._group)
            self._compressor.reset()
        self.forget()

    def forget(self) -> None:
        """No gradient is there yet."""
        self._missing = [len(numbers) for numbers in self.layout.members]
        self._streams: list[set[torch.cuda.Stream]] = [set() for _ in self._missing]
        self._endings: list[Callable[[], None]] = []

    @property
    def sent(self) -> int:
        return len(self._endings)

    def has_place(self, number: int) -> bool:
        return number in self.layout.place

    def place(self, number: int) -> torch.Tensor:
        return self.layout.place[number][1]

    def arrive(self, number: int, share: float) -> None:
        """All of a gradient is there."""
        self.store(number, share)
        self._missing[self.layout.place[number][0]] -= 1

    def store(self, number: int, share: float) -> None:
        """Move a gradient to its place, times ``share``."""
        parameter, (index, view) = self._parameters[number], self.layout.place[number]
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.strided:  # a sparse one is gathered when backward has ended
            view.zero_()
            return
        if gradient is not view or share != 1.0:
            torch.mul(gradient, share, out=view)
        parameter.grad = view
        if view.is_cuda:
            self._streams[index].add(torch.cuda.current_stream(view.device))

    def send_full(self) -> None:
        while self.sent < len(self._missing) and not self._missing[self.sent]:
            self._send()

    def send_rest(self, seen: Collection[int], share: float, shadow: bool) -> None:
        """What backward has not brought is what was there before it, or zeros; a shadow has only zeros."""
        while self.sent < len(self._missing):
            for number in self.layout.members[self.sent]:
                if shadow:
                    self.place(number).zero_()
                elif number not in seen:
                    self.store(number, share)
            self._send()

    def wait(self) -> None:
        for end in self._endings:
            end()

    def scale(self, factor: float) -> None:
        for bucket in self.layout.buckets:
            bucket.flat.mul_(factor)

    def _send(self) -> None:
        for stream in self._streams[self.sent]:  # a layer may compute on a stream of its own
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._endings.append(self._compressor.start(self.layout.buckets[self.sent], self._group))
