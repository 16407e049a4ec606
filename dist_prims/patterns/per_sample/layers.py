"""Layers whose weight gradients have factors, which are computed from a layer's input and the gradient of its output.

The first dimension of tensors is that of the samples. The others are those in the model: a batch of one sample, or the
rows that the model made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from .factors import Matrix, Part, Plain, Rows

__all__: list[str] = []

Parts = tuple[Part, Part | None]  # of the weight and of the bias
Build = Callable[[torch.Tensor, torch.Tensor], Parts]


@dataclass
class Layer:
    """A call of a known function: its input, weight and bias. ``build`` makes parts of (input, gradient of output)."""

    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    build: Build


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Layer:
    def build(x: torch.Tensor, grad: torch.Tensor) -> Parts:
        if weight.dim() == 1:  # one output, which is no dimension
            grad = grad.unsqueeze(-1)
        left, right = (each.reshape(len(each), 1, -1, each.shape[-1]) for each in (grad, x))
        return Matrix(left, right), Plain(left.sum((1, 2)))

    return Layer(input, weight, bias, build)


def _embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Layer:
    if max_norm is not None or scale_grad_by_freq:
        raise ValueError(
            "per-sample gradients: an embedding with max_norm or scale_grad_by_freq mixes the samples of a batch; "
            "make it without them, or choose other parameters with of="
        )
    count, width = weight.shape

    def build(x: torch.Tensor, grad: torch.Tensor) -> Parts:
        rows, values = x.reshape(len(x), -1).long(), grad.reshape(len(x), -1, width)
        if padding_idx is not None:
            values = values.masked_fill((rows == padding_idx % count).unsqueeze(2), 0)
        return Rows(rows, values, count), None

    return Layer(input, weight, None, build)


def _conv(dims: int) -> Callable[..., Layer]:
    def conv(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Layer:
        kernel, strides, steps = weight.shape[2:], _each(stride, dims), _each(dilation, dims)
        spans = [step * (size - 1) for size, step in zip(kernel, steps, strict=True)]
        same = [(span // 2, span - span // 2) for span in spans]
        edges = same if padding == "same" else [(each, each) for each in _each(padding, dims)]

        def build(x: torch.Tensor, grad: torch.Tensor) -> Parts:
            x, grad = _batched(x, dims), _batched(grad, dims)
            left, right = _positions(grad, groups), _windows(x, edges, kernel, strides, steps, groups)
            return Matrix(left, right, weight.shape[2:].numel()), Plain(grad.transpose(1, 2).flatten(2).sum(2))

        return Layer(input, weight, bias, build)

    return conv


def _conv_transpose(dims: int) -> Callable[..., Layer]:
    """The factors of a convolution with input and gradient of the output exchanged."""

    def conv_transpose(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Layer:
        edges = [(each, each) for each in _each(padding, dims)]
        strides, steps = _each(stride, dims), _each(dilation, dims)

        def build(x: torch.Tensor, grad: torch.Tensor) -> Parts:
            x, grad = _batched(x, dims), _batched(grad, dims)
            left = _positions(x, groups)
            right = _windows(grad, edges, weight.shape[2:], strides, steps, groups, places=x.shape[3:])
            return Matrix(left, right, weight.shape[2:].numel()), Plain(grad.transpose(1, 2).flatten(2).sum(2))

        return Layer(input, weight, bias, build)

    return conv_transpose


def _each(value: Any, dims: int) -> list[int]:
    if value == "valid":
        return [0] * dims
    values = [value] if isinstance(value, int) else [*value]
    return values * dims if len(values) == 1 else values


def _batched(x: torch.Tensor, dims: int) -> torch.Tensor:
    """(sample, row, channel, place...): the input of a layer may have no batch dimension."""
    return x if x.dim() == dims + 3 else x.unsqueeze(1)


def _positions(x: torch.Tensor, groups: int) -> torch.Tensor:
    """(sample, group, position, channel), where rows and places make positions."""
    samples, rows, channels = x.shape[:3]
    split = x.reshape(samples, rows, groups, channels // groups, -1)
    return split.permute(0, 2, 3, 1, 4).reshape(samples, groups, channels // groups, -1).mT


def _windows(
    x: torch.Tensor,
    edges: Sequence[tuple[int, int]],
    kernel: Sequence[int],
    strides: Sequence[int],
    steps: Sequence[int],
    groups: int,
    places: Sequence[int] | None = None,
) -> torch.Tensor:
    """(sample, group, position, kernel * channel): the inputs under the kernel at each position.

    Channels come last, so that whole rows of the kernel are copied, not single numbers.
    """
    samples, _, channels = x.shape[:3]
    x = x.movedim(2, -1)
    if any(edge for pair in edges for edge in pair):
        x = F.pad(x, [0, 0, *(edge for pair in reversed(edges) for edge in pair)])
    x = x.contiguous().view(*x.shape[:-1], groups, channels // groups)
    for dim, (size, stride, step) in enumerate(zip(kernel, strides, steps, strict=True)):
        x = x.unfold(2 + dim, step * (size - 1) + 1, stride)[..., ::step]
        if places is not None:
            x = x.narrow(2 + dim, 0, places[dim])
    dims = len(kernel)
    place, under = range(2, 2 + dims), range(4 + dims, 4 + 2 * dims)
    x = x.permute(0, 2 + dims, 1, *place, *under, 3 + dims)
    return x.reshape(samples, groups, -1, torch.Size(kernel).numel() * (channels // groups))


def _layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Layer:
    def build(x: torch.Tensor, grad: torch.Tensor) -> Parts:
        normal = F.layer_norm(x, normalized_shape, eps=eps)
        return _scaled(normal, grad, normalized_shape)

    return Layer(input, weight, bias, build)


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Layer:
    def build(x: torch.Tensor, grad: torch.Tensor) -> Parts:
        return _scaled(F.rms_norm(x, [*normalized_shape], eps=eps), grad, normalized_shape)

    return Layer(input, weight, None, build)


def _scaled(normal: torch.Tensor, grad: torch.Tensor, shape: Sequence[int]) -> Parts:
    """The scale and the shift of each element of the last dimensions."""
    flat = (len(grad), -1, *shape)
    return Plain((normal * grad).reshape(flat).sum(1)), Plain(grad.reshape(flat).sum(1))


def _group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Layer:
    return _by_channel(input, weight, bias, lambda x: F.group_norm(x, num_groups, eps=eps))


def _batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Layer | None:
    if training or running_mean is None:  # normalised by the sample's own statistics
        return None
    return _by_channel(input, weight, bias, lambda x: F.batch_norm(x, running_mean, running_var, eps=eps))


def _instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Layer:
    mean, var = (None, None) if use_input_stats else (running_mean, running_var)

    def normal(x: torch.Tensor) -> torch.Tensor:
        return F.instance_norm(x, mean, var, use_input_stats=use_input_stats, eps=eps)

    return _by_channel(input, weight, bias, normal)


def _by_channel(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    normal: Callable[[torch.Tensor], torch.Tensor],
) -> Layer:
    """The scale and the shift of each channel, the dimension after the batch's."""

    def build(x: torch.Tensor, grad: torch.Tensor) -> Parts:
        product = normal(x.flatten(0, 1)).view(x.shape) * grad
        scale, shift = (each.transpose(1, 2).flatten(2).sum(2) for each in (product, grad))
        return Plain(scale), Plain(shift)

    return Layer(x, weight, bias, build)


# None for a call without factors
LAYERS: dict[Callable[..., Any], Callable[..., Layer | None]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.conv1d: _conv(1),
    F.conv2d: _conv(2),
    F.conv3d: _conv(3),
    F.conv_transpose1d: _conv_transpose(1),
    F.conv_transpose2d: _conv_transpose(2),
    F.conv_transpose3d: _conv_transpose(3),
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
}
