"""Softmax and cross-entropy of logits split by columns, with the exact gradient of the unsplit ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...collectives.call import group_of
from ..first_order_only import once
from .columns import Announcement, Targets, VocabularyPart, agree
from .row_statistics import RowStatistics, Rule, gradient, losses_of, softmax_of

__all__: list[str] = []

REDUCTIONS = ("mean", "sum", "none")


def split_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    class_weight: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """``F.cross_entropy`` of logits whose columns are split over the ranks: the same loss, the same bits, on each.

    >>> logits = torch.tensor([[1000.0, 0.0], [0.0, 0.0]], requires_grad=True)
    >>> loss = split_cross_entropy(logits, torch.tensor([1, 0]), reduction="none")
    >>> [round(each, 4) for each in loss.tolist()]
    [1000.0, 0.6931]
    >>> loss.sum().backward()
    >>> logits.grad
    tensor([[ 1.0000, -1.0000],
            [-0.5000,  0.5000]])

    ``logits``: (..., columns) of this rank's words, which follow those of the ranks before it; a rank may have more
    columns than another, or none. ``targets``: (...) numbers of words, the same on every rank. ``class_weight``: of
    this rank's columns, as ``weight`` is in ``F.cross_entropy``; other arguments are as there. Half types are added in
    float32 and the loss stays float32. Every rank calls it and goes backward from the same loss; the backward sends
    nothing.
    """
    home = group_of(group, "split_cross_entropy")

    def prepare() -> tuple[Announcement, Rule]:
        _check_logits(logits)
        return announcement_of(
            logits, logits.shape[-1], targets, class_weight, label_smoothing, ignore_index, reduction
        )

    part, rule = agree("split_cross_entropy", home, logits, prepare)
    losses: torch.Tensor
    flat = logits.flatten(0, -2)
    losses, weights = _CrossEntropy.apply(flat, targets.long().flatten(), part, rule)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses.view(targets.shape)
    total = losses.sum()
    mean: torch.Tensor = total / weights.sum()
    return total if reduction == "sum" else mean


def split_log_softmax(logits: torch.Tensor, *, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """``F.log_softmax`` over the last dimension, whose columns are split over the ranks: this rank's columns of it.

    >>> split_log_softmax(torch.tensor([[1000.0, 0.0]]))
    tensor([[    0., -1000.]])

    The backward sums the gradient's rows over the ranks, one number each, so every rank takes part in it.
    """
    home = group_of(group, "split_log_softmax")

    def prepare() -> tuple[Announcement, None]:
        _check_logits(logits)
        learn = torch.is_grad_enabled() and logits.requires_grad
        return Announcement(
            f"{_described(logits)}, {'with' if learn else 'without'} a gradient", logits.shape[-1]
        ), None

    part, _ = agree("split_log_softmax", home, logits, prepare)
    found: torch.Tensor = _LogSoftmax.apply(logits.flatten(0, -2), part)  # type: ignore[no-untyped-call]
    return found.view(logits.shape)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, part: VocabularyPart, rule: Rule) -> Any:
        losses, rows = losses_of(logits, targets, part, rule)
        weights = torch.where(rows.live, rows.weights, 0)
        ctx.mark_non_differentiable(weights)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(*rows)
            ctx.share, ctx.rule, ctx.kind = part.share, rule, logits.dtype
        return losses, weights

    @staticmethod
    @once
    def backward(ctx: Any, by_row: torch.Tensor, _: torch.Tensor) -> Any:
        return gradient(RowStatistics(*ctx.saved_tensors), by_row, ctx.share, ctx.rule).to(ctx.kind), None, None, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, part: VocabularyPart) -> torch.Tensor:
        largest, log_sum = softmax_of(logits, part)
        found = torch.sub(logits, largest[:, None]).sub_(log_sum[:, None]).to(logits.dtype)
        ctx.save_for_backward(found)
        ctx.group = part.group
        return found

    @staticmethod
    @once
    def backward(ctx: Any, by_log: torch.Tensor) -> Any:
        (found,) = ctx.saved_tensors
        kind = torch.promote_types(found.dtype, torch.float32)
        sums = by_log.sum(1, dtype=kind)
        dist.all_reduce(sums, group=ctx.group)
        return (by_log - found.to(kind).exp() * sums[:, None]).to(found.dtype), None


def _check_logits(logits: torch.Tensor) -> None:
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"logits are {type(logits).__name__}; give a tensor")
    if logits.dim() < 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits are {logits.dtype} of shape {tuple(logits.shape)}; give floats of two or more dimensions, the "
            "last of them this rank's columns"
        )


def announcement_of(
    rows: torch.Tensor,
    columns: int,
    targets: torch.Tensor,
    class_weight: torch.Tensor | None,
    smoothing: float,
    ignore_index: int,
    reduction: str,
    further: str = "",
) -> tuple[Announcement, Rule]:
    """The announcement of a cross-entropy of ``rows`` (..., any), and its rule; ValueError for wrong arguments."""
    _check_targets(targets, rows)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}; choose one of {', '.join(map(repr, REDUCTIONS))}")
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing={smoothing} must be from 0 to 1")
    total, weighted = float(columns), "without"
    if class_weight is not None:
        if class_weight.shape != (columns,):
            raise ValueError(f"class_weight has shape {tuple(class_weight.shape)}; this rank has {columns} columns")
        total, weighted = float(class_weight.sum(dtype=torch.float64)), "with"
        kind = torch.promote_types(rows.dtype, torch.float32)
        class_weight = class_weight.detach().to(rows.device, kind)
    text = f"{_described(rows)}, label_smoothing={smoothing}, ignore_index={ignore_index}, reduction={reduction!r}, "
    text += f"{weighted} class_weight{further}"
    found = Targets.of(targets.long(), ignore_index)
    return Announcement(text, columns, total, found), Rule(smoothing, ignore_index, class_weight)


def _check_targets(targets: torch.Tensor, rows: torch.Tensor) -> None:
    if targets.shape != rows.shape[:-1]:
        raise ValueError(f"targets have shape {tuple(targets.shape)}; there are {tuple(rows.shape[:-1])} rows")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ValueError(f"targets are {targets.dtype}; give numbers of words, such as torch.int64")
    if targets.device != rows.device:
        raise ValueError(f"targets are on {targets.device} and rows on {rows.device}; move them to one device")


def _described(rows: torch.Tensor) -> str:
    return f"rows {tuple(rows.shape[:-1])}, {rows.dtype}, on {rows.device.type}"
