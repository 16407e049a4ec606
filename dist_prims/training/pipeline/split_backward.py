"""Split backward: the gradient of a stage's input first, its weights' later.

The previous stage waits for the gradient of the input, but no rank waits for the gradients of the weights: so a plan
that separates them computes the weights' gradients while the rank would be idle. Autograd has one backward only; to
call it twice, first for the input and then for the weights, runs the chain of input gradients twice. Instead, while a
stage's forward runs, each ``linear``, ``conv`` and ``embedding`` that a module calls, and whose weight is a leaf, is
replaced by a function with the same result, whose backward returns the input's gradient and stores (input, gradient of
the output) for later. All other parameters get their gradients together with the input: norms, which are cheap,
functions that compute several layers as a whole, such as ``nn.MultiheadAttention``, and layers within
``torch.utils.checkpoint``, ``torch.compile`` or ``torch.func``. Checkpointing computes a forward again in the backward
and matches its saved tensors with those of the first forward, one by one; so both forwards must be autograd's alone. A
forward that calls ``torch.autograd.grad`` is refused: it needs some gradients only, and the function here cannot know
which.

Where the gradient of a weight is a product of matrices, and neither a hook nor a bias needs the same computation, it is
added to ``.grad`` while it is computed, without a temporary tensor.

>>> layer, later = torch.nn.Linear(2, 1), Later()
>>> x = torch.ones(1, 2, requires_grad=True)
>>> with split_backward(later):
...     y = layer(x)
>>> y.backward()
>>> x.grad is None, layer.weight.grad is None
(False, True)
>>> later.drain()
>>> layer.weight.grad, layer.bias.grad
(tensor([[1., 1.]]), tensor([1.]))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...torch_compat import has_gradient_hooks, is_in_function_transform, is_view, saved_tensor_hooks

__all__: list[str] = []

Grads = tuple[torch.Tensor, torch.Tensor | None]  # of weight and bias


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same memory that is not a view: autograd forbids changes in place of views of custom
    functions."""
    place = (tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*place)


class Later:
    """The deferred weight gradients of a micro-batch in one stage."""

    def __init__(self) -> None:
        self._deferred: list[tuple[_Layer, torch.Tensor, torch.Tensor]] = []  # layer, input, gradient of the output
        self.in_forward = False

    def add(self, layer: _Layer, x: torch.Tensor, grad: torch.Tensor) -> None:
        """Defer the gradients of a layer with this input and this gradient of the output."""
        self._deferred.append((layer, x, grad))

    def check(self) -> None:
        """RuntimeError in a backward that is not the one at the end of the forward, or is to be differentiated."""
        if self.in_forward or torch.is_grad_enabled():
            raise RuntimeError(
                "a stage or loss differentiates within its forward, or for a second derivative, and its backward is to "
                "be split; choose a plan that does not split it, such as '1f1b'"
            )

    def drain(self) -> None:
        """Accumulate the weights' gradients as autograd does, hooks included, and free their inputs."""
        deferred, self._deferred = self._deferred, []
        deferred.reverse()
        shared = _SharedWeights(layer for layer, _, _ in deferred)
        while deferred:  # the tensors of a layer are freed as soon as its gradients are computed
            layer, x, grad = deferred.pop()
            with torch.no_grad():
                if shared.has_one_layer(layer.weight) and layer.add_product(x, grad):
                    continue
                weight, bias = layer.weight_grads(x, grad)
            shared.accumulate(layer.weight, weight)
            if bias is not None and layer.bias is not None:
                shared.accumulate(layer.bias, bias)


class _SharedWeights:
    """Sums the gradients of a weight that several layers share before they are accumulated: a hook of the weight is
    called once, with the whole gradient."""

    def __init__(self, layers: Iterable[_Layer]) -> None:
        weights = (each for layer in layers for each in (layer.weight, layer.bias) if each is not None)
        self._missing = Counter(map(id, weights))  # the layers whose gradient has not come yet, by the id of the weight
        self._sums: dict[int, torch.Tensor] = {}

    def has_one_layer(self, weight: torch.Tensor) -> bool:
        return self._missing[id(weight)] == 1 and id(weight) not in self._sums

    def accumulate(self, weight: torch.Tensor, grad: torch.Tensor) -> None:
        """Add a layer's gradient; the last one of a weight goes to ``.grad``, with all before it."""
        key, grad = id(weight), grad.to(weight.dtype)
        if key in self._sums:
            grad = self._sums.pop(key) + grad
        self._missing[key] -= 1
        if self._missing[key]:
            self._sums[key] = grad
        else:
            weight.backward(grad)


class split_backward(TorchFunctionMode):
    """Context in which, on this thread, weights' gradients are deferred to ``later``."""

    def __init__(self, later: Later) -> None:
        super().__init__()
        self._later = later

    def __enter__(self) -> split_backward:
        self._later.in_forward = True
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._later.in_forward = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # 1. Is it a call of a layer whose gradients can be deferred?
        layer_from = _LAYERS.get(func)
        if layer_from is None or not torch.is_grad_enabled() or _must_not_defer():
            return func(*args, **kwargs)
        layer, x = layer_from(*args, **kwargs)
        if layer is None or not layer.can_defer(x):
            return func(*args, **kwargs)
        # 2. Call the layer. Its weights are detached, or autograd would give them and their hooks a gradient of None.
        weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        device = x.device.type
        if layer.is_cast and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight = _cast(x, dtype), _cast(weight, dtype)
            bias = None if bias is None else _cast(bias, dtype)
        # 3. The anchor makes the output require a gradient where the input does not, as in a model's first layer.
        anchor = torch.empty(0, device=x.device, requires_grad=not x.requires_grad)
        return _Deferred.apply(x, anchor, layer, self._later, weight, bias)  # type: ignore[no-untyped-call]


def _must_not_defer() -> bool:
    """Whether autograd must compute the layer as a whole: under checkpointing, which sets saved-tensor hooks, and
    within torch.compile and the transforms of torch.func, which do not support the function used here."""
    if torch.compiler.is_compiling():
        return True
    hooked = saved_tensor_hooks()
    return hooked is not None or is_in_function_transform()


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast as autocast does: float64 and integers stay."""
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


class _Deferred(torch.autograd.Function):
    """A layer whose backward computes the gradient of the input, and defers the gradients of the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor,
        layer: _Layer,
        later: Later,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.later = layer, later
        device = x.device.type
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            output = layer.forward(x, weight, bias)
        return same_memory(output) if is_view(output) else output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.later.check()
        x, weight = ctx.saved_tensors
        ctx.later.add(ctx.layer, x.detach(), grad)
        input_grad = ctx.layer.input_grad(x, weight, grad) if ctx.needs_input_grad[0] else None
        return input_grad, None, None, None, None, None


def layer_of(node: Any) -> _Layer | None:
    """The layer whose weight gradients a node of autograd's graph defers."""
    layer = getattr(node, "layer", None)
    return layer if isinstance(layer, _Layer) else None


class _Layer:
    """One call of a layer: its weights and settings, and its forward and backward as functions of tensors."""

    is_cast = True  # by autocast

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def can_defer(self, x: torch.Tensor) -> bool:
        """Whether the weight gradients can be deferred: not if a weight is computed, complex or of a subclass."""
        weights = [each for each in (self.weight, self.bias) if each is not None]
        plain = all(type(each) in (torch.Tensor, torch.nn.Parameter) for each in weights)
        return plain and all(each.is_leaf and each.requires_grad and not each.is_complex() for each in weights)

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError

    def input_grad(self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def weight_grads(self, x: torch.Tensor, grad: torch.Tensor) -> Grads:
        raise NotImplementedError

    def factors(self, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Matrices (n, out, k) and (n, k, in); the sum of their n products is the weight's gradient."""
        return None

    def add_product(self, x: torch.Tensor, grad: torch.Tensor) -> bool:
        """Add the weight's gradient to ``.grad`` without a temporary tensor, and return True.

        Return False, and do nothing, unless the gradient is a product of matrices and ``.grad`` exists, is contiguous
        and has the gradient's dtype. The same if a hook needs the gradient by itself, or if there is a bias, whose
        gradient ``weight_grads`` computes together with the weight's.
        """
        total = self.weight.grad
        hooks = has_gradient_hooks(self.weight)
        if self.bias is not None or total is None or hooks or not total.is_contiguous() or total.dtype != grad.dtype:
            return False
        factors = self.factors(x, grad)
        if factors is not None:
            total.view(len(total), -1).addbmm_(*factors)
        return factors is not None


class _Linear(_Layer):
    def can_defer(self, x: torch.Tensor) -> bool:
        return super().can_defer(x) and self.weight.dim() == 2

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def input_grad(self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad.matmul(weight)

    def weight_grads(self, x: torch.Tensor, grad: torch.Tensor) -> Grads:
        rows = grad.reshape(-1, grad.shape[-1])
        weight = rows.t().mm(x.reshape(-1, x.shape[-1]))
        return weight, None if self.bias is None else rows.sum(0)

    def factors(self, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        return grad.reshape(1, -1, grad.shape[-1]).transpose(1, 2), x.reshape(1, -1, x.shape[-1])


class _Conv(_Layer):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *settings: Any) -> None:
        super().__init__(weight, bias)
        spatial = weight.dim() - 2  # of a setting there is one number, or one for each spatial dimension
        lists = [[value] * spatial if isinstance(value, int) else list(value) for value in settings[:3]]
        self.stride, self.padding, self.dilation = (value * spatial if len(value) == 1 else value for value in lists)
        self.groups: int = settings[3]

    def can_defer(self, x: torch.Tensor) -> bool:
        return super().can_defer(x) and x.dim() == self.weight.dim()  # an image without batch dimension is not deferred

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        settings = (self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups)
        return torch.convolution(x, weight, bias, *settings)

    def input_grad(self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        input_grad: torch.Tensor = self._backward(x, weight, grad, [True, False, False])[0]
        return input_grad

    def weight_grads(self, x: torch.Tensor, grad: torch.Tensor) -> Grads:
        weight = self.weight.detach().to(x.dtype)
        _, weight_grad, bias_grad = self._backward(x, weight, grad, [False, True, self.bias is not None])
        return weight_grad, bias_grad

    def factors(self, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        is_pointwise = all(each == 1 for each in (*self.weight.shape[2:], *self.stride, self.groups))
        return (grad.flatten(2), x.flatten(2).transpose(1, 2)) if is_pointwise and not any(self.padding) else None

    def _backward(self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, mask: list[bool]) -> Any:
        output_padding = [0] * len(self.stride)
        bias_sizes = None if self.bias is None else list(self.bias.shape)
        settings = (self.stride, self.padding, self.dilation, False, output_padding, self.groups)
        return torch.ops.aten.convolution_backward(grad, x, weight, bias_sizes, *settings, mask)


class _Embedding(_Layer):
    is_cast = False

    def __init__(self, weight: torch.Tensor, padding_idx: int, by_frequency: bool) -> None:
        super().__init__(weight, None)
        self.padding_idx, self.by_frequency = padding_idx, by_frequency

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.embedding(weight, x, self.padding_idx, self.by_frequency)

    def weight_grads(self, x: torch.Tensor, grad: torch.Tensor) -> Grads:
        count = self.weight.shape[0]
        weight_grad = torch.ops.aten.embedding_dense_backward(grad, x, count, self.padding_idx, self.by_frequency)
        return weight_grad, None


# The functions below have the parameters of the functions of torch in ``_LAYERS``, and return the layer and its input.
# They return None in place of a layer whose gradients autograd must compute as a whole.
_Call = tuple[_Layer | None, torch.Tensor]


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> _Call:
    return _Linear(weight, bias), input


def _conv(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> _Call:
    if isinstance(padding, str):  # "same" pads the two sides together by (size - 1) * dilation
        spatial = weight.shape[2:]
        dilations = [dilation] * len(spatial) if isinstance(dilation, int) else list(dilation)
        both_sides = [(size - 1) * step for size, step in zip(spatial, dilations, strict=True)]
        if padding != "valid" and any(each % 2 for each in both_sides):
            return None, input  # one more on one side than on the other
        padding = 0 if padding == "valid" else [each // 2 for each in both_sides]
    return _Conv(weight, bias, stride, padding, dilation, groups), input


def _embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> _Call:
    if max_norm is not None or sparse:
        return None, input
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return _Embedding(weight, padding, scale_grad_by_freq), input


_LAYERS: dict[Any, Callable[..., _Call]] = {
    F.linear: _linear,
    torch.conv1d: _conv,
    torch.conv2d: _conv,
    torch.conv3d: _conv,
    F.embedding: _embedding,
}
