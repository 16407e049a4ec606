"""Recorder of the inputs of known layers, and of the graph edges of the gradients of their outputs.

The model runs under vmap, as if it had one sample, so the dimension of the samples is known, whatever the model does
with the others. The recorder detaches the weights of known layers. If autograd still finds a gradient of a parameter,
the model uses the parameter in a way that the recorder does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from ...torch_compat import transform_level, unbatched, version_of
from .factors import Part
from .layers import LAYERS, Layer

__all__: list[str] = []


class Use:
    """One call of a known layer, with the names of its weight and bias."""

    def __init__(self, layer: Layer, weight: str | None, bias: str | None, output: torch.Tensor) -> None:
        self.weight, self.bias, self._build = weight, bias, layer.build
        y, self._dim = unbatched(output)
        self.edge: GradientEdge = get_gradient_edge(y)  # stays valid if y is changed in place
        x, self._x_dim = unbatched(layer.x)
        self._x, self._seen = x.detach(), version_of(x)

    def parts(self, grad: torch.Tensor) -> tuple[Part, Part | None]:
        """The parts of weight and bias, from the gradient at the edge."""
        x = self._x
        if version_of(x) != self._seen:  # as autograd checks its saved tensors
            raise RuntimeError(
                f"per-sample gradients: the input of the layer of {self.weight or self.bias!r} was changed in place "
                "after the layer had used it; replace the in-place operation"
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
        self._level = transform_level()  # the number of active transforms

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = LAYERS.get(func)
        if read is None or not torch.is_grad_enabled() or transform_level() != self._level:
            return func(*args, **kwargs)  # an edge does not exist within a transform of the model
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
        tensor, dim = unbatched(y)
        if dim is None or not tensor.requires_grad:
            y = y + self._zero.to(y.dtype)
        self._uses.append(Use(layer, weight, bias, y))
        return y
