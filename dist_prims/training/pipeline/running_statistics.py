"""Running statistics of a stage under micro-batches: moved once a batch, by the statistics of the whole batch.

Stock norms move their running mean and variance in every forward. In a pipeline that is once a micro-batch: with
momentum 0.1 and 8 micro-batches a step forgets 57 % of the past instead of 10 %, and the variance between micro-batches
is lost. Norms of another class would remove the stock norms from the model of which a program still calls ``eval()``,
``to()`` and ``state_dict()``. So the modules stay. While a micro-batch passes through a stage, each ``batch_norm`` and
``instance_norm`` that would move a buffer of the stage gets scratch memory in place of it, with momentum 1, so that the
kernel leaves its own statistics there. They are merged over the micro-batches, and the buffers are moved when the step
has succeeded.

A layer that is called several times in a forward moves its statistics that often, in that order, as without a pipeline.
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
    model themselves, as in gradient accumulation. SyncBatchNorm moves its statistics in every forward.

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
        self._calls: dict[tuple[int, int], _Merged] = {}  # by buffer, and how often it had been called in this forward
        self._counts: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # of batches, and what is to be added
        self._known: dict[int, torch.Tensor] | None = None  # the buffers; searched once a batch

    @contextmanager
    def collected(self, again: bool = False) -> Iterator[None]:
        """Within it, the statistics of a micro-batch's forward are collected, and no running statistic changes.

        ``again``: the statistics are discarded, because the backward computes the forward again.
        """
        if not self._buffers:
            yield
            return
        # 1. Remember what a forward changes, beside the buffers, in each norm.
        norms: list[Any] = [each for each in self._module.modules() if _counts_batches(each, again)]
        before: list[tuple[float | None, torch.Tensor]] = [(each.momentum, each.num_batches_tracked) for each in norms]
        # 2. Run the forward with counts and buffers that may be written.
        # Without momentum a norm takes the mean over all batches, and so reads the count.
        scratch = [
            count.clone() if momentum is None else torch.zeros((), dtype=torch.int64) for momentum, count in before
        ]
        try:
            for norm, count in zip(norms, scratch, strict=True):
                norm.num_batches_tracked = count
                norm.momentum = 0.0 if again else norm.momentum  # SyncBatchNorm calls a function of its own
            with _InScratch(self._buffers, {} if again else self._calls):
                yield
        finally:
            # 3. Put back what was there.
            for norm, (momentum, count) in zip(norms, before, strict=True):
                norm.momentum, norm.num_batches_tracked = momentum, count
        # 4. The first micro-batch says how often each norm is called in a forward; the counts of others are dropped.
        if self._counts is None and not again:
            self._counts = [
                (count, more - count if momentum is None else more)
                for (momentum, count), more in zip(before, scratch, strict=True)
            ]

    @torch.no_grad()
    def commit(self) -> None:
        """End the batch: move the running statistics by the statistics collected."""
        for call in self._calls.values():
            call.commit()
        for tracked, more in self._counts or ():
            tracked.add_(more.to(tracked.device, non_blocking=True))
        self.forget()

    def forget(self) -> None:
        """Discard the statistics of this batch."""
        self._calls.clear()
        self._counts = self._known = None

    @property
    def _buffers(self) -> dict[int, torch.Tensor]:
        """The buffers of this batch that may be running statistics, by id."""
        if self._known is None:
            every = (buffer for each in self._module.modules() for buffer in each._buffers.values())
            self._known = {
                id(each): each for each in every if each is not None and each.dim() == 1 and each.is_floating_point()
            }
        return self._known


def _counts_batches(module: nn.Module, again: bool) -> bool:
    own = isinstance(module, SyncBatchNorm) and not again  # it moves its statistics itself, in the first forward only
    return isinstance(module, Norm) and not own and module.num_batches_tracked is not None


class _Call(NamedTuple):
    """The arguments of ``batch_norm`` and ``instance_norm`` that matter here, which both take in these places."""

    input: torch.Tensor
    running_mean: torch.Tensor | None = None
    running_var: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


class _InScratch(TorchFunctionMode):
    """Within it, on this thread and in the backward that it starts, norms write their statistics into scratch memory,
    from which they are merged into ``calls``."""

    def __init__(self, buffers: Container[int], calls: dict[tuple[int, int], _Merged]) -> None:
        super().__init__()
        self._buffers, self._calls = buffers, calls
        self._turn: Counter[int] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._norm(func, _Call(*args, **kwargs))
        if func is F.instance_norm:
            kwargs = {"training" if name == "use_input_stats" else name: value for name, value in kwargs.items()}
            return self._norm(func, _Call(*args, **{"training": True, **kwargs} if len(args) < 6 else kwargs))
        return func(*args, **kwargs)

    def _norm(self, func: Callable[..., Any], call: _Call) -> Any:
        mean, variance = call.running_mean, call.running_var
        if not call.training or mean is None or variance is None or id(mean) not in self._buffers:
            return func(*call)
        seen = torch.zeros_like(mean), torch.zeros_like(variance)
        output = func(*call._replace(running_mean=seen[0], running_var=seen[1], momentum=1.0))
        key = id(mean), self._turn[id(mean)]
        self._turn[id(mean)] += 1
        if key not in self._calls:
            kind = _Merged if func is F.batch_norm else _MergedInstances
            self._calls[key] = kind(mean, variance, call.momentum)
        self._calls[key].add(*seen, call.input)
        return output


class _Merged:
    """The statistics of one call over the micro-batches, and the buffers that they are to move."""

    def __init__(self, running_mean: torch.Tensor, running_var: torch.Tensor, momentum: float) -> None:
        self._running = running_mean, running_var
        self._momentum = momentum
        self._mean, self._squares = torch.zeros_like(running_mean), torch.zeros_like(running_var)
        self._elements = 0

    @torch.no_grad()
    def add(self, mean: torch.Tensor, variance: torch.Tensor, input: torch.Tensor) -> None:
        """Merge the statistics of more elements by the rule of Chan, Golub and LeVeque, which unlike sums of squares
        does not cancel."""
        elements = input.numel() // input.shape[1]
        if elements:
            share = elements / (self._elements + elements)
            apart = mean - self._mean
            self._squares += variance * (elements - 1) + apart.square() * (self._elements * share)
            self._mean += apart * share
            self._elements += elements

    def variance(self) -> torch.Tensor:
        return self._squares / (self._elements - 1)

    def commit(self) -> None:
        if self._elements:
            self._running[0].lerp_(self._mean, self._momentum)
            self._running[1].lerp_(self.variance(), self._momentum)


class _MergedInstances(_Merged):
    """Of ``instance_norm``, which moves its buffers by means over the items of the statistics of each."""

    @torch.no_grad()
    def add(self, mean: torch.Tensor, variance: torch.Tensor, input: torch.Tensor) -> None:
        items = len(input)
        if items:
            self._elements += items
            self._mean.lerp_(mean, items / self._elements)
            self._squares.lerp_(variance, items / self._elements)

    def variance(self) -> torch.Tensor:
        return self._squares
