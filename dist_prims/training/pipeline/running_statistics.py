"""Running statistics of a stage under micro-batches: updated once a batch, from the statistics of the whole batch.

The norms of torch.nn update their running mean and variance in every forward. In a pipeline that is once a micro-batch:
with momentum 0.1 and 8 micro-batches a step forgets 57 % of the past instead of 10 %, and the variance between
micro-batches is lost.

The norms cannot be replaced by a class of ours, because the program calls ``eval()``, ``to()`` and ``state_dict()`` of
its own model. So the modules stay. While a micro-batch passes through a stage, this module intercepts ``batch_norm``
and ``instance_norm``. A call that would update a buffer of the stage gets scratch memory instead of the buffer, and
momentum 1, so that the kernel writes the statistics of the micro-batch there. The statistics of all micro-batches are
merged, and the buffers are updated when the step has succeeded.

If a layer is called several times in one forward, its buffers are updated once for each call, in the same order as
without a pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import SyncBatchNorm
from torch.overrides import TorchFunctionMode

from ...torch_compat import Norm

__all__: list[str] = []


class RunningStatistics:
    """The running statistics of some modules over the micro-batches of a batch.

    ``Pipeline`` and ``DevicePipeline`` use it by themselves. It is also for programs that pass micro-batches through a
    model themselves, as in gradient accumulation. SyncBatchNorm updates its buffers itself, in every forward.

    >>> norm = torch.nn.BatchNorm1d(1)
    >>> statistics = RunningStatistics([norm])
    >>> for micro in torch.tensor([[[0.0], [2.0]], [[4.0], [6.0]]]):
    ...     with statistics.collected():
    ...         _ = norm(micro)
    >>> norm.running_mean, norm.num_batches_tracked
    (tensor([0.]), tensor(0))
    >>> statistics.commit()
    >>> norm.running_mean, norm.num_batches_tracked  # a tenth of the way to the mean of all four
    (tensor([0.3000]), tensor(1))
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._module = nn.ModuleList(modules)
        # By the id of the running mean, and the number of earlier calls with it in the same forward.
        self._calls: dict[tuple[int, int], _MergedBatchNorm] = {}
        # The num_batches_tracked of each norm, and what is to be added to it; None before the first micro-batch.
        self._counts: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._known: dict[int, torch.Tensor] | None = None  # the buffers of this batch; None: to be searched

    @contextmanager
    def collected(self, is_recompute: bool = False) -> Iterator[None]:
        """Collect the statistics of the forward of a micro-batch inside this context. No buffer changes.

        ``is_recompute``: the backward computes the forward again, and its statistics are discarded.
        """
        if not self._running_buffers:
            yield
            return
        # 1. Remember the momentum and the count of batches of each norm.
        norms: list[Any] = [each for each in self._module.modules() if _counts_batches(each, is_recompute)]
        before: list[tuple[float | None, torch.Tensor]] = [(each.momentum, each.num_batches_tracked) for each in norms]
        # 2. Run the forward with a scratch count and scratch buffers. A norm with momentum=None averages over all
        #    batches, and reads its count, so that its scratch count begins with it.
        scratch = [
            count.clone() if momentum is None else torch.zeros((), dtype=torch.int64) for momentum, count in before
        ]
        try:
            for norm, count in zip(norms, scratch, strict=True):
                norm.num_batches_tracked = count
                # SyncBatchNorm does not call batch_norm and is not intercepted: momentum 0 keeps its buffers.
                norm.momentum = 0.0 if is_recompute else norm.momentum
            with _ScratchBuffers(self._running_buffers, {} if is_recompute else self._calls):
                yield
        finally:
            # 3. Put back what was there.
            for norm, (momentum, count) in zip(norms, before, strict=True):
                norm.momentum, norm.num_batches_tracked = momentum, count
        # 4. The counts grow by what the first micro-batch has added; the other micro-batches add nothing.
        if self._counts is None and not is_recompute:
            self._counts = [
                (count, after - count if momentum is None else after)
                for (momentum, count), after in zip(before, scratch, strict=True)
            ]

    @torch.no_grad()
    def commit(self) -> None:
        """End the batch: update the buffers from the statistics collected."""
        for call in self._calls.values():
            call.commit()
        for tracked, increment in self._counts or ():
            tracked.add_(increment.to(tracked.device, non_blocking=True))
        self.forget()

    def forget(self) -> None:
        """Discard the statistics of this batch."""
        self._calls.clear()
        self._counts = self._known = None

    @property
    def _running_buffers(self) -> dict[int, torch.Tensor]:
        """The buffers of this batch that may be running statistics, by id."""
        if self._known is None:
            every = (buffer for each in self._module.modules() for buffer in each._buffers.values())
            self._known = {
                id(each): each for each in every if each is not None and each.dim() == 1 and each.is_floating_point()
            }
        return self._known


def _counts_batches(module: nn.Module, is_recompute: bool) -> bool:
    updates_itself = isinstance(module, SyncBatchNorm) and not is_recompute
    return isinstance(module, Norm) and not updates_itself and module.num_batches_tracked is not None


class _Call(NamedTuple):
    """Arguments of ``batch_norm`` and ``instance_norm``. Both functions have them at the same positions."""

    input: torch.Tensor
    running_mean: torch.Tensor | None = None
    running_var: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


class _ScratchBuffers(TorchFunctionMode):
    """Context in which norms write their statistics into scratch memory, which is merged into ``calls``.

    It holds for this thread, and for a backward pass that this thread starts.
    """

    def __init__(self, buffers: Container[int], calls: dict[tuple[int, int], _MergedBatchNorm]) -> None:
        super().__init__()
        self._buffers, self._calls = buffers, calls
        self._calls_of_buffer: Counter[int] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._norm(func, _Call(*args, **kwargs))
        if func is F.instance_norm:
            # ``use_input_stats``, in the place of ``training``, is True by default.
            kwargs = {"training" if name == "use_input_stats" else name: value for name, value in kwargs.items()}
            return self._norm(func, _Call(*args, **{"training": True, **kwargs} if len(args) < 6 else kwargs))
        return func(*args, **kwargs)

    def _norm(self, func: Callable[..., Any], call: _Call) -> Any:
        mean, variance = call.running_mean, call.running_var
        if not call.training or mean is None or variance is None or id(mean) not in self._buffers:
            return func(*call)
        scratch = torch.zeros_like(mean), torch.zeros_like(variance)
        output = func(*call._replace(running_mean=scratch[0], running_var=scratch[1], momentum=1.0))
        key = id(mean), self._calls_of_buffer[id(mean)]
        self._calls_of_buffer[id(mean)] += 1
        if key not in self._calls:
            kind = _MergedBatchNorm if func is F.batch_norm else _MergedInstanceNorm
            self._calls[key] = kind(mean, variance, call.momentum)
        self._calls[key].add(*scratch, call.input)
        return output


class _MergedBatchNorm:
    """The statistics of one call of ``batch_norm`` over the micro-batches, and the buffers to be updated from them."""

    def __init__(self, running_mean: torch.Tensor, running_var: torch.Tensor, momentum: float) -> None:
        self._running = running_mean, running_var
        self._momentum = momentum
        self._mean, self._squares = torch.zeros_like(running_mean), torch.zeros_like(running_var)
        self._elements = 0

    @torch.no_grad()
    def add(self, mean: torch.Tensor, variance: torch.Tensor, input: torch.Tensor) -> None:
        """Merge the statistics of a micro-batch by the formula of Chan, Golub and LeVeque.

        Sums of squares would lose precision by cancellation.
        """
        elements = input.numel() // input.shape[1]
        if elements:
            share = elements / (self._elements + elements)
            difference = mean - self._mean
            self._squares += variance * (elements - 1) + difference.square() * (self._elements * share)
            self._mean += difference * share
            self._elements += elements

    def variance(self) -> torch.Tensor:
        return self._squares / (self._elements - 1)

    def commit(self) -> None:
        if self._elements:
            self._running[0].lerp_(self._mean, self._momentum)
            self._running[1].lerp_(self.variance(), self._momentum)


class _MergedInstanceNorm(_MergedBatchNorm):
    """The statistics of one call of ``instance_norm``: the means over all items, so that a micro-batch counts by its
    number of items."""

    @torch.no_grad()
    def add(self, mean: torch.Tensor, variance: torch.Tensor, input: torch.Tensor) -> None:
        items = len(input)
        if items:
            self._elements += items
            self._mean.lerp_(mean, items / self._elements)
            self._squares.lerp_(variance, items / self._elements)

    def variance(self) -> torch.Tensor:
        return self._squares
