"""Fused last layer and cross-entropy, by chunks of rows, so that the logits never exist as a whole.

Logits are the largest tensor of a language model, and only the loss needs them. The logits of a chunk are computed,
turned into losses, then, in place, into their gradient, and that into gradients of the rows, the weight and the bias.
All of it happens in the *forward*: the backward only multiplies by the gradient of the loss. Computing the logits again
in the backward would allow a loss for every row, and cost four products of matrices instead of three; it would save no
memory, since the backward needs the gradient of the weight in any case.

A rank's part of a row's gradient comes from its own words; the sum over the ranks is sent while the next chunk's logits
are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ...collectives.call import group_of
from ..first_order_only import once
from .columns import Announcement, VocabularyPart, agree
from .losses import announcement_of
from .row_statistics import Rule, gradient, losses_of

__all__: list[str] = []


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    chunk: int = 1024,
    class_weight: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias), targets)`` with the rows of ``weight``, the words, split over
    the ranks; no more than ``chunk`` rows of logits exist at a time.

    >>> hidden, weight = torch.ones(3, 2, requires_grad=True), torch.eye(2, requires_grad=True)
    >>> loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 1]), chunk=2)
    >>> loss.backward()
    >>> round(loss.item(), 4), weight.grad.sum(1)
    (0.6931, tensor([ 0.3333, -0.3333]))

    ``hidden``: (..., features) and ``targets``: (...), both the same on every rank; ``weight``: (columns, features) and
    ``bias``: (columns,) of this rank's words, which follow those of the ranks before it. ``reduction`` is "mean" or
    "sum". The gradient of ``hidden`` is that of the whole, the same on every rank. Every rank calls it, with the same
    arguments but for its columns; the backward sends nothing, and can be done once.
    """
    home = group_of(group, "linear_cross_entropy")
    learn = torch.is_grad_enabled()  # read here: within a forward of autograd it is always off

    def prepare() -> tuple[Announcement, tuple[Rule, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]]:
        given = _lowered(hidden, weight, bias)
        _check(*given, chunk, reduction)
        rows, needed = given[0], "with" if learn and given[0].requires_grad else "without"
        further = f", features {rows.shape[-1]}, chunk={chunk}, hidden {needed} a gradient"
        announced, rule = announcement_of(
            rows, len(weight), targets, class_weight, label_smoothing, ignore_index, reduction, further
        )
        return announced, (rule, given)

    part, (rule, (rows, mine, its_bias)) = agree("linear_cross_entropy", home, hidden, prepare)
    work = _Work(part, rule, chunk, reduction, learn)
    with torch.autocast(rows.device.type, enabled=False):
        numbers = targets.long().flatten()
        loss: torch.Tensor = _Fused.apply(rows.flatten(0, -2), mine, its_bias, numbers, work)  # type: ignore[no-untyped-call]
    return loss


class _Work(NamedTuple):
    part: VocabularyPart
    rule: Rule
    chunk: int
    reduction: str
    learn: bool  # whether a backward may come


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        work: _Work,
    ) -> torch.Tensor:
        needs = [work.learn and each for each in ctx.needs_input_grad]
        sums = _Sums(hidden, weight, bias, needs, work.part.group)
        losses, counts = [hidden.new_zeros(1, dtype=sums.kind)], [hidden.new_zeros(1, dtype=sums.kind)]
        for begin in range(0, len(hidden), work.chunk):
            rows = slice(begin, begin + work.chunk)
            logits = F.linear(hidden[rows], weight, bias)
            of_rows, kept = losses_of(logits, targets[rows], work.part, work.rule)
            del logits
            losses.append(of_rows)
            counts.append(torch.where(kept.live, kept.weights, 0))
            if sums.wanted:
                by_logits = gradient(kept, torch.ones_like(of_rows), work.part.share, work.rule, out=kept.exponents)
                sums.add(rows, by_logits.to(hidden.dtype))
        ctx.gradients = sums.finish()
        ctx.kinds = (hidden.dtype, weight.dtype, hidden.dtype)
        total, count = torch.cat(losses).sum(), torch.cat(counts).sum()
        if work.reduction == "sum":
            ctx.factor = torch.ones_like(total)
            return total
        ctx.factor = torch.where(count > 0, 1 / count, 0)  # without a row that counts, no gradient
        return total / count

    @staticmethod
    @once
    def backward(ctx: Any, by_loss: torch.Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("linear_cross_entropy: a second backward; its gradients were freed after the first")
        gradients, ctx.gradients = ctx.gradients, None
        factor = by_loss * ctx.factor
        found = [
            None if each is None else each.mul_(factor).to(kind)
            for each, kind in zip(gradients, ctx.kinds, strict=True)
        ]
        return *found, None, None


class _Sums:
    """Gradients, accumulated chunk by chunk; those of weight and bias in float32 at least."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        needs: Sequence[bool],
        group: dist.ProcessGroup,
    ) -> None:
        self.kind = torch.promote_types(hidden.dtype, torch.float32)
        self.wanted = any(needs)
        self._hidden, self._weight, self._group = hidden, weight, group
        # Contiguous, since chunks of rows are sent.
        self._by_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs[0] else None
        self._by_weight = torch.zeros_like(weight, dtype=self.kind) if needs[1] else None
        self._by_bias = torch.zeros_like(bias, dtype=self.kind) if bias is not None and needs[2] else None
        self._leaving: list[Any] = []

    def add(self, rows: slice, by_logits: torch.Tensor) -> None:
        if self._by_hidden is not None:
            mine = torch.mm(by_logits, self._weight, out=self._by_hidden[rows])
            self._leaving.append(dist.all_reduce(mine, group=self._group, async_op=True))
        if self._by_weight is not None and by_logits.dtype == self.kind:
            self._by_weight.addmm_(by_logits.t(), self._hidden[rows])
        elif self._by_weight is not None:
            self._by_weight.add_(by_logits.t() @ self._hidden[rows])
        if self._by_bias is not None:
            self._by_bias.add_(by_logits.sum(0, dtype=self.kind))

    def finish(self) -> tuple[torch.Tensor | None, ...]:
        for work in self._leaving:
            work.wait()
        return self._by_hidden, self._by_weight, self._by_bias


def _lowered(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The arguments as autocast would cast them in ``F.linear``: all but float64."""
    for name, each in (("hidden", hidden), ("weight", weight)):
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"{name} is {type(each).__name__}; give a tensor")
    device = hidden.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return hidden, weight, bias
    kind = torch.get_autocast_dtype(device)

    def low(each: torch.Tensor) -> torch.Tensor:
        return each.to(kind) if each.is_floating_point() and each.dtype != torch.float64 else each

    return low(hidden), low(weight), None if bias is None else low(bias)


def _check(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chunk: int, reduction: str) -> None:
    if weight.dim() != 2 or hidden.dim() < 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit; give (..., features) and "
            "(columns, features)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; this rank has {len(weight)} columns")
    kinds = {each.dtype for each in (hidden, weight, bias) if each is not None}
    if len(kinds) > 1 or not hidden.is_floating_point():
        raise ValueError(
            f"hidden, weight and bias have dtypes {', '.join(sorted(map(str, kinds)))}; give them one of floats"
        )
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be a number of rows, at least 1")
    if reduction == "none":
        raise ValueError("reduction='none' would need logits twice; choose 'mean' or 'sum', or use split_cross_entropy")
