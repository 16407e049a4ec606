"""Loss and metrics of a batch that is computed in micro-batches, and the weight of each micro-batch in them.

A loss that is a mean divides by the *weight* of its micro-batch: the number of items, or, with ``ignore_index`` or
class weights, the weight of the targets that count. The loss of the batch is the mean over the micro-batches with these
weights. The sum of the weights must be known before the first backward, when the last micro-batches have not been
computed. So the weights are computed from the targets, all of which are known when a step begins.

>>> from functools import partial
>>> targets = [(torch.tensor([1, 2, 0]),), (torch.tensor([0, 0, 3]),)]
>>> for (share,) in Objective(partial(F.cross_entropy, ignore_index=0)).shares([3, 3], targets):
...     print(share.fraction)
0.6666666666666666
0.3333333333333333
>>> [share.fraction for (share,) in Objective(F.mse_loss).shares([3, 1], targets)]
[0.75, 0.25]
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .split_backward import layer_of
from .stage import Tensors

__all__: list[str] = []

Function = Callable[..., torch.Tensor]  # of the output, or the tuple of them, and the target
_MODULES = ("CrossEntropyLoss", "NLLLoss", "LinearCrossEntropyLoss")  # the last is new in torch 2.13
_FORWARDS = {getattr(nn, name).forward for name in _MODULES if hasattr(nn, name)}
_IGNORED = -100  # the ignore_index of torch's losses, by default


class Share(NamedTuple):
    """The share of a micro-batch in the loss, or in a metric, of the batch."""

    fraction: float  # its weight, divided by the weight of the batch
    inverse: float = 1.0  # 1, divided by the weight of the batch


class _Divisor(NamedTuple):
    """What the loss of a micro-batch divides by."""

    weight: Callable[..., Any]  # function of the targets
    summed: Function | None = None  # the same loss without the division, if known


class Objective:
    """Loss and metrics of a pipeline.

    Args:
        loss, metrics: functions of the output and the targets of a micro-batch; a metric is a mean.
        reduction: "mean" or "sum": what the loss of a micro-batch is, and so the loss of the batch.
        loss_weight: function(target), what the loss of a micro-batch divides by; None: see :func:`_divisor_of`.
        scaler: a GradScaler.
    """

    def __init__(
        self,
        loss: Function | None,
        metrics: Mapping[str, Function] | None = None,
        reduction: str = "mean",
        loss_weight: Callable[..., Any] | None = None,
        scaler: Any = None,
    ) -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f"pipeline: reduction={reduction!r}; the loss is a 'mean' or a 'sum' over the batch")
        if loss_weight is not None and (reduction == "sum" or not callable(loss_weight)):
            raise ValueError(
                f"pipeline: loss_weight={loss_weight!r} with reduction={reduction!r}; it is a function of the targets, "
                "for a loss that is a mean"
            )
        if scaler is not None and not callable(getattr(scaler, "scale", None)):
            raise TypeError(f"pipeline: scaler={scaler!r} has no scale(); give a GradScaler, or None")
        self.loss, self.metrics, self.reduction = loss, dict(metrics or {}), reduction
        self.module = loss if isinstance(loss, nn.Module) else None
        self.scaler = scaler
        # The divisors of the loss and of each metric; None: the number of items.
        self._given = None if loss_weight is None else _Divisor(loss_weight)
        self._divisors = [self._given or (None if loss is None or reduction == "sum" else _divisor_of(loss))]
        self._divisors += map(_divisor_of, self.metrics.values())
        self._is_checked = False  # whether a step with this loss has ended

    def check(self) -> Function:
        """The loss; ValueError if there is none."""
        if self.loss is None:
            raise ValueError("pipeline: it was made without a loss; step() and evaluate() need one (loss=)")
        return self.loss

    def start_scaler(self, device: torch.device) -> None:
        """Initialise a rank's scaler: one that has scaled nothing refuses to unscale."""
        if self.scaler is not None:
            self.scaler.scale(torch.zeros((), device=device))

    def shares(self, lengths: Sequence[int], targets: Sequence[Tensors]) -> list[tuple[Share, ...]]:
        """The shares of every micro-batch in the loss of the batch and in each metric."""
        by_function = [_shares(each, lengths, targets, each is self._given) for each in self._divisors]
        if self.reduction == "sum":
            by_function[0] = [Share(1.0)] * len(lengths)
        return list(zip(*by_function, strict=True))

    def __call__(
        self, outputs: Tensors, target: Tensors, shares: Sequence[Share], known: Callable[[], Iterable[torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
        """The root of a micro-batch's backward (the tensor from which it begins), the gradient of the root, and the
        contributions of the micro-batch to the loss and to each metric.

        Args:
            outputs, target: of the micro-batch; ``shares``: its shares in the loss and in each metric.
            known: returns the leaves that the loss may reach past ``outputs``.
        """
        output = outputs[0] if len(outputs) == 1 else outputs
        value = self._value(outputs, output, target, shares[0])
        if value.requires_grad and not self._is_checked:
            _refuse_unlisted_parameters(value, outputs, (*known(), *target))
        metrics: list[Any] = []
        if self.metrics:
            with torch.no_grad():
                pairs = zip(shares[1:], self.metrics.values(), strict=True)
                metrics = [share.fraction and each(output, *target) * share.fraction for share, each in pairs]
            for name, metric in zip(self.metrics, metrics, strict=True):
                _require_one_number(f"metric {name!r}", metric)
        root = value if self.scaler is None else self.scaler.scale(value)
        factor = shares[0].fraction or 1.0  # a micro-batch of weight 0 has its contribution as value
        return root, torch.full_like(root, factor), [value.detach() * factor, *metrics]

    def _value(self, outputs: Tensors, output: Any, target: Tensors, share: Share) -> torch.Tensor:
        """The loss of a micro-batch; if its weight is 0, its contribution to the loss of the batch."""
        loss, divisor = self.check(), self._divisors[0]
        if not share.fraction:  # a mean would divide by zero
            if divisor is None or divisor.summed is None:
                zero: torch.Tensor = _Zero.apply(*outputs)  # type: ignore[no-untyped-call]
                return zero
            return divisor.summed(output, *target) * share.inverse  # 0, but for smoothed labels of weightless classes
        checks = divisor is None and self.reduction == "mean" and not self._is_checked
        with _UnweightedMeans() if checks else nullcontext():
            value = loss(output, *target)
        _require_one_number("loss", value)
        return value

    def end_step(self) -> None:
        """Mark the end of a step: the loss function is checked in the first one only."""
        self._is_checked = True


def _shares(divisor: _Divisor | None, lengths: Sequence[int], targets: Sequence[Tensors], given: bool) -> list[Share]:
    """The share of each micro-batch in a loss or metric with this divisor; None: by their ``lengths``. ``given``: the
    program has given the divisor, which is then called even if a batch has no targets."""
    weights: Sequence[float] = lengths
    if divisor is not None and (given or targets[0]):  # without a target the loss itself raises
        with torch.no_grad():
            numbers = [torch.as_tensor(divisor.weight(*target)) for target in targets]
        if any(number.dim() for number in numbers):
            raise ValueError(f"pipeline: loss_weight gives shapes {[[*each.shape] for each in numbers]}, not numbers")
        weights = torch.stack([number.double() for number in numbers]).tolist()
        if any(each < 0 or not math.isfinite(each) for each in weights):
            raise ValueError(f"pipeline: the micro-batches weigh {weights}; a weight is a finite number from 0")
    total = sum(weights)
    if not total:
        return [Share(math.nan)] * len(weights)  # as the mean of nothing is
    return [Share(each / total, 1 / total) for each in weights]


def _divisor_of(loss: Function) -> _Divisor | None:
    """The divisor of a loss of torch whose targets count differently; None: the number of items."""
    # 1. What is within functools.partial and torch.compile?
    settings: dict[str, Any] = {}
    whole = loss
    while isinstance(loss, partial) and not loss.args:
        settings, loss = {**loss.keywords, **settings}, loss.func
    inner = getattr(loss, "_orig_mod", loss)  # of torch.compile
    # 2. A module: its settings may change until it is called.
    if isinstance(inner, nn.Module) and type(inner).forward in _FORWARDS:
        return _Divisor(partial(_weight_by_module, inner), partial(_sum_by_module, inner, whole))
    # 3. A function.
    if inner not in (F.cross_entropy, F.nll_loss) or not _is_mean(settings):
        return None
    weight = partial(_weight_of_targets, settings.get("weight"), settings.get("ignore_index", _IGNORED))
    old = {name: None for name in ("size_average", "reduce") if name in settings}
    return _Divisor(weight, partial(whole, reduction="sum", **old))


def _is_mean(settings: Mapping[str, Any]) -> bool:
    """Whether a loss function of torch with these keyword arguments is a mean; two of them are from old versions."""
    averages, reduces = settings.get("size_average"), settings.get("reduce")
    if averages is None and reduces is None:
        return bool(settings.get("reduction", "mean") == "mean")
    return averages is not False and reduces is not False


def _weight_by_module(loss: Any, target: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """What a loss that is a module of torch divides by."""
    if loss.reduction != "mean":
        return torch.tensor(len(target))
    return _weight_of_targets(loss.weight, _IGNORED if loss.ignore_index is None else loss.ignore_index, target)


def _sum_by_module(module: Any, loss: Function, output: torch.Tensor, *target: torch.Tensor) -> torch.Tensor:
    """The sum of which a module of torch computes the mean; ``loss`` calls the module."""
    reduction, module.reduction = module.reduction, "sum" if module.reduction == "mean" else module.reduction
    try:
        return loss(output, *target)
    finally:
        module.reduction = reduction


def _weight_of_targets(
    weight: torch.Tensor | None, ignored: int, target: torch.Tensor, *_: torch.Tensor
) -> torch.Tensor:
    """What the mean of a cross entropy divides by: for class indices the sum of the weights of the classes that are not
    ``ignored``, for probabilities the number of items."""
    if target.is_floating_point():
        return torch.tensor(len(target))
    counts = target != ignored
    if weight is None:
        return counts.sum()
    classes = target.clamp(0, len(weight) - 1)  # the loss raises for an index out of range
    return torch.where(counts, weight.detach().to(target.device).double()[classes], 0.0).sum()


class _Zero(torch.autograd.Function):
    """A loss of zero with gradients of zero, so that parameters have a gradient, as with the batch in one piece."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*outputs)
        return outputs[0].new_zeros((), dtype=torch.get_default_dtype())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        needs = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.zeros_like(each) if need else None for each, need in needs)


class _UnweightedMeans(TorchFunctionMode):
    """Context that warns if a loss of the program takes a mean of which the pipeline does not know the weight."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss) and _is_mean(kwargs):
            names = dict(zip(("input", "target", "weight"), args, strict=False)) | kwargs
            target, weight = names["target"], names.get("weight")
            indices = not target.is_floating_point()
            if indices and (weight is not None or bool((target == names.get("ignore_index", _IGNORED)).any())):
                warnings.warn(
                    f"pipeline: the loss takes the mean of {func.__name__} over targets that count differently, and "
                    "micro-batches are weighted by their items, so loss and gradients are not those of the whole "
                    f"batch; give {func.__name__} itself (functools.partial sets options), or give by "
                    "loss_weight= the weight of the targets of a micro-batch",
                    stacklevel=2,
                )
        return func(*args, **kwargs)


def _require_one_number(what: str, value: Any) -> None:
    if isinstance(value, torch.Tensor) and (value.dim() or value.is_complex()):
        found = f"a tensor of {value.dtype} and shape {list(value.shape)}"
        raise ValueError(f"pipeline: the {what} is {found}; it must be one real number")


def _refuse_unlisted_parameters(loss: torch.Tensor, outputs: Tensors, known: Iterable[torch.Tensor]) -> None:
    """ValueError if the loss learns a tensor that is neither in the pipeline's parameters() nor a target."""
    seen = {each.grad_fn for each in outputs if each.grad_fn is not None}
    ours = {id(each) for each in (*known, *outputs)}
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        layer = layer_of(node)
        leaves = [getattr(node, "variable", None), *((layer.weight, layer.bias) if layer else ())]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.numel() and id(leaf) not in ours:  # an anchor has no numbers
                raise ValueError(
                    f"pipeline: the loss learns a parameter of shape {list(leaf.shape)} which parameters() does not "
                    "have, since the loss is no torch.nn.Module; make it one that holds the parameter"
                )
        nodes += [following for following, _ in node.next_functions]
