"""Recorder of the inputs of known layers, and of the graph edges of the gradients of their outputs.

The model runs under vmap, as if it had one sample: so the dimension of the samples is known, whatever the model does
with the others. Known layers get their weights detached. A gradient that autograd still finds for a parameter then
comes from another use, which the recorder does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from .factors import Part
from .layers import LAYERS, Layer

__all__: list[str] = []

_functorch: Any = torch._C._functorch  # the only access to vmap's tensors; a Function with a vmap rule costs 0.3 ms


class Use:
    """One call of a known layer by the parameters of these names."""

    def __init__(self, layer: Layer, weight: str | None, bias: str | None, output: torch.Tensor) -> None:
        self.weight, self.bias, self._build = weight, bias, layer.build
        y, self._dim = _unwrapped(output)
        self.edge: GradientEdge = get_gradient_edge(y)  # stays valid if y is changed in place
        x, self._x_dim = _unwrapped(layer.x)
        self._x, self._version = x.detach(), x._version

    def parts(self, grad: torch.Tensor) -> tuple[Part, Part | None]:
        """The parts of weight and bias, from the gradient at the edge."""
        x = self._x
        if x._version != self._version:  # as autograd checks its saved tensors
            raise RuntimeError(
                f"per-sample gradients: the input of the layer of {self.weight or self.bias!r} was changed in place "
                "after the layer had used it; use the operation that is not in place"
            )
        x = x.unsqueeze(0).expand(grad.shape[self._dim], *x.shape) if self._x_dim is None else x.movedim(self._x_dim, 0)
        return self._build(x, grad.movedim(self._dim, 0))


class Recorder(TorchFunctionMode):
    """Context that records known layers that use one of ``names`` (names of parameters by id) in ``uses``.

    ``zero`` is 0 for each sample and requires a gradient: adding it makes a tensor depend on the sample and require
    one.
    """

    def __init__(self, names: dict[int, str], zero: torch.Tensor, uses: list[Use]) -> None:
        super().__init__()
        self._names, self._zero, self._uses = names, zero, uses
        self._level = _functorch.maybe_current_level()  # the number of active transforms

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = LAYERS.get(func)
        if read is None or not torch.is_grad_enabled() or _functorch.maybe_current_level() != self._level:
            return func(*args, **kwargs)  # within a transform of the model's own there is no edge
        layer = read(*args, **kwargs)
        if layer is None:
            return func(*args, **kwargs)
        used = [each if id(each) in self._names else None for each in (layer.weight, layer.bias)]
        weight, bias = (self._names.get(id(each)) for each in (layer.weight, layer.bias))
        if weight is None and bias is None:
            return func(*args, **kwargs)
        known = {id(each): each.detach() for each in used if each is not None}
        args = tuple(each if each is layer.x else known.get(id(each), each) for each in args)
        kwargs = {key: each if each is layer.x else known.get(id(each), each) for key, each in kwargs.items()}
        y = func(*args, **kwargs)
        tensor, dim = _unwrapped(y)
        if dim is None or not tensor.requires_grad:
            y = y + self._zero.to(y.dtype)
        self._uses.append(Use(layer, weight, bias, y))
        return y


def _unwrapped(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The tensor of all samples, and their dimension; None where x does not depend on the sample."""
    if not _functorch.is_batchedtensor(x):
        return x, None
    tensor: tuple[torch.Tensor, int] = _functorch._unwrap_batched(x, _functorch.maybe_get_level(x))
    return tensor
