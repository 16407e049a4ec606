"""Batch norm under micro-batches: running statistics of the whole batch, without recomputed forwards.

``Pipeline`` and ``DevicePipeline`` do this by themselves for stock norms: :mod:`.running_statistics`. This module is
for programs that pass micro-batches through a model themselves, as in gradient accumulation.

Each micro-batch is normalised by its own statistics, since those of the others are not known yet. But the stock module
also moves its running statistics at every micro-batch: with momentum 0.1 and 8 of them they forget 57 % of their past a
step, not 10 %, and the variance between micro-batches is lost on them. Here they are merged (mean and squared distance
from it, by Chan, Golub and LeVeque's rule, which unlike sums of squares does not cancel) and moved once, by what the
whole batch would have moved them.

A forward that activation checkpointing repeats must not be counted again: :func:`recomputing`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn import functional as F

from ...torch_compat import BatchNorm, Norm, children_of

__all__: list[str] = []

_STOCK = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_here = threading.local()  # autograd repeats a forward on its thread for the device, while another may be going ahead


@torch.no_grad()
def merge(
    mean: torch.Tensor,
    squares: torch.Tensor,
    elements: int,
    more_mean: torch.Tensor,
    more_variance: torch.Tensor,
    more_elements: int,
) -> int:
    """Add statistics of more elements to mean and squared distance from it, in place; of how many they are then.

    >>> mean, squares = torch.tensor([1.0]), torch.tensor([2.0])  # of 0 and 2
    >>> merge(mean, squares, 2, torch.tensor([5.0]), torch.tensor([2.0]), 2)  # 4 and 6
    4
    >>> mean, squares / 3
    (tensor([3.]), tensor([6.6667]))
    """
    if more_elements:
        share = more_elements / (elements + more_elements)
        apart = more_mean - mean
        squares += more_variance * (more_elements - 1) + apart.square() * (elements * share)
        mean += apart * share
    return elements + more_elements


class DeferredBatchNorm(BatchNorm):
    """A batch norm with ``stock``'s parameters and buffers, which moves them once in ``micro_batches`` forwards.

    >>> norm = DeferredBatchNorm(nn.BatchNorm1d(1), micro_batches=2)
    >>> _ = norm(torch.tensor([[0.0], [2.0]]))
    >>> norm.running_mean
    tensor([0.])
    >>> _ = norm(torch.tensor([[4.0], [6.0]]))
    >>> norm.running_mean  # a tenth of the way to the mean of all four
    tensor([0.3000])
    """

    _mean: torch.Tensor
    _squares: torch.Tensor

    def __init__(self, stock: BatchNorm, micro_batches: int) -> None:
        super().__init__(stock.num_features, stock.eps, stock.momentum, affine=False, track_running_stats=False)
        self.affine, self.track_running_stats = stock.affine, stock.track_running_stats
        self.weight, self.bias = stock.weight, stock.bias
        self.running_mean, self.running_var = stock.running_mean, stock.running_var
        self.num_batches_tracked = stock.num_batches_tracked
        self.training = stock.training
        self.micro_batches = micro_batches
        self._kind = type(stock)
        for name, like in (("_mean", stock.running_mean), ("_squares", stock.running_var)):
            self.register_buffer(name, None if like is None else torch.zeros_like(like), persistent=False)
        self._elements = self._seen = 0

    def _check_input_dim(self, input: torch.Tensor) -> None:
        self._kind._check_input_dim(self, input)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.training and self.track_running_stats) or self.running_mean is None or self.running_var is None:
            return super().forward(input)
        self._check_input_dim(input)
        # With momentum 1 the kernel leaves its own statistics in place of the old ones: no other pass over the data.
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        output = F.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        if not getattr(_here, "recomputing", False):
            elements = input.numel() // self.num_features
            self._elements = merge(self._mean, self._squares, self._elements, mean, variance, elements)
            self._seen += 1
            if self._seen == self.micro_batches:
                self.commit()
        return output

    @torch.no_grad()
    def commit(self) -> None:
        """End the batch: move the running statistics by the statistics collected."""
        if self._elements and self.running_mean is not None and self.running_var is not None:
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
            factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum  # type: ignore[arg-type]
            self.running_mean.lerp_(self._mean, factor)
            self.running_var.lerp_(self._squares / (self._elements - 1), factor)
        self.forget()

    def forget(self) -> None:
        """Discard the statistics of this batch."""
        self._elements = self._seen = 0
        if self.running_mean is not None:
            self._mean.zero_()
            self._squares.zero_()


def defer_batch_norm(model: nn.Module, micro_batches: int) -> nn.Module:
    """Replace the batch norms within ``model`` by deferred ones, which keep their names, parameters and buffers.

    >>> model = defer_batch_norm(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), micro_batches=4)
    >>> model[1].micro_batches, list(model.state_dict())[-1]
    (4, '1.num_batches_tracked')

    The model is changed and returned; only where it is itself a batch norm, another is. On a model that is deferred
    already it sets ``micro_batches`` and begins a new batch. The statistics of a batch with fewer micro-batches are
    applied by :func:`commit_batch_norm`. SyncBatchNorm stays as it is.
    """
    if micro_batches < 1:
        raise ValueError(f"defer_batch_norm: micro_batches={micro_batches} must be 1 or more")
    made: dict[nn.Module, nn.Module] = {}
    for parent in [nn.ModuleList([model]), *model.modules()]:
        for name, child in children_of(parent).items():
            if isinstance(child, DeferredBatchNorm):
                child.micro_batches = micro_batches
                child.forget()
            elif type(child) in _STOCK:
                assert isinstance(child, BatchNorm)
                if child not in made:  # a module may have several places
                    made[child] = DeferredBatchNorm(child, micro_batches)
                children_of(parent)[name] = made[child]
    return made.get(model, model)


def commit_batch_norm(model: nn.Module) -> None:
    """End the batch in every deferred batch norm, before all micro-batches have run.

    >>> model = defer_batch_norm(nn.Sequential(nn.BatchNorm1d(1)), micro_batches=4)
    >>> _ = model(torch.tensor([[0.0], [2.0]]))
    >>> commit_batch_norm(model)
    >>> model[0].running_mean
    tensor([0.1000])
    """
    for module in model.modules():
        if isinstance(module, DeferredBatchNorm):
            module.commit()


@contextmanager
def recomputing(*models: nn.Module) -> Iterator[None]:
    """Within it, on this thread, no deferred batch norm counts its inputs; nor does a stock norm within ``models``.

    >>> model = nn.BatchNorm1d(1)
    >>> with recomputing(model):
    ...     _ = model(torch.tensor([[0.0], [2.0]]))
    >>> model.running_mean, model.num_batches_tracked
    (tensor([0.]), tensor(0))
    """
    norms = {each for model in models for each in model.modules() if isinstance(each, Norm)}
    stock = [
        (each, each.momentum, each.num_batches_tracked) for each in norms if not isinstance(each, DeferredBatchNorm)
    ]
    before = getattr(_here, "recomputing", False)
    _here.recomputing = True
    counter = torch.zeros((), dtype=torch.int64)  # counts for all of them, and is discarded
    for norm, _, tracked in stock:  # not track_running_stats: checkpointing counts the tensors that autograd keeps
        norm.momentum, norm.num_batches_tracked = 0.0, None if tracked is None else counter
    try:
        yield
    finally:
        _here.recomputing = before
        for norm, momentum, tracked in stock:
            norm.momentum, norm.num_batches_tracked = momentum, tracked


def checkpoint_contexts(*models: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For ``torch.utils.checkpoint``: ``context_fn=checkpoint_contexts``, or a ``partial`` of it with the models.

    >>> from functools import partial
    >>> from torch.utils.checkpoint import checkpoint
    >>> model = nn.BatchNorm1d(1)
    >>> x = torch.tensor([[0.0], [2.0]], requires_grad=True)
    >>> checkpoint(model, x, use_reentrant=False, context_fn=partial(checkpoint_contexts, model)).sum().backward()
    >>> model.num_batches_tracked
    tensor(1)
    """
    return nullcontext(), recomputing(*models)
