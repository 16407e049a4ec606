"""Profile of a model's layers: the costs by which a model is cut into stages and a pipeline's plan is priced.

A layer is run by itself on its real input, so that forward and backward can be timed apart. The backward has two
figures, since a plan may separate its parts: the gradient of the input, for which the stage before waits, and the
gradients of the weights, for which no stage waits. The second figure is the time of the whole backward minus the first.
Profiling leaves gradients, statistics and random states as they were.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .chain import Pop, Stash, call, layers

__all__: list[str] = []


@dataclass(frozen=True)
class LayerCost:
    """Seconds and bytes of one layer, or of several (``+``), for one micro-batch.

    >>> LayerCost("0", 1.0, 2.0, 3.0, 10, 4) + LayerCost("1", 1.0, 1.0, 1.0, 10, 0)
    LayerCost(name='0..1', forward=2.0, input_grad=3.0, weight_grad=4.0, activation_bytes=20, parameter_bytes=4)
    """

    name: str
    forward: float
    input_grad: float
    weight_grad: float
    activation_bytes: int  # what the backward needs, beyond what earlier layers have kept already
    parameter_bytes: int

    @property
    def seconds(self) -> float:
        return self.forward + self.input_grad + self.weight_grad

    @property
    def memory(self) -> int:
        """Parameters, their gradients, and activations."""
        return 2 * self.parameter_bytes + self.activation_bytes

    def __add__(self, other: LayerCost) -> LayerCost:
        return LayerCost(
            f"{self.name.split('..')[0]}..{other.name.split('..')[-1]}",
            self.forward + other.forward,
            self.input_grad + other.input_grad,
            self.weight_grad + other.weight_grad,
            self.activation_bytes + other.activation_bytes,
            self.parameter_bytes + other.parameter_bytes,
        )


def profile(model: nn.Module, sample: Any, *, runs: int = 5) -> list[LayerCost]:
    """The costs of each of ``layers`` of ``model``, medians of ``runs``, for a micro-batch like ``sample``.

    >>> [cost.name for cost in profile(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(1, 2), runs=1)]
    ['0', '1']

    ``sample`` is a tensor or a tuple of them; it is brought to the device of the model's parameters.
    """
    if runs < 1:
        raise ValueError(f"profile: runs={runs} must be 1 or more")
    chain = layers(model)
    first = next(model.parameters(), None)
    x = _map_tensors(sample, lambda tensor: tensor.to(first.device if first is not None else tensor.device))
    device = first.device if first is not None and first.is_cuda else None
    with _undisturbed(model), torch.enable_grad(), nullcontext() if device is None else torch.cuda.device(device):
        saved = _walk(chain, x, _SavedBytes(model).measure)  # warms up, too
        timed = [_walk(chain, x, _seconds) for _ in range(runs)]
    costs = []
    for index, (name, layer) in enumerate(chain):
        forward, input_grad, both = (
            statistics.median(part) for part in zip(*(run[index] for run in timed), strict=True)
        )
        parameter_bytes = sum(parameter.nbytes for parameter in layer.parameters())
        weight_grad = max(both - input_grad, 0.0)
        costs.append(LayerCost(name, forward, input_grad, weight_grad, saved[index], parameter_bytes))
    return costs


def stage_costs(costs: Sequence[LayerCost], sizes: Sequence[int]) -> list[LayerCost]:
    """The costs of stages of ``sizes`` layers, such as a plan's ``cost()`` asks for.

    >>> layer = LayerCost("a", 1.0, 1.0, 1.0, 0, 0)
    >>> [stage.forward for stage in stage_costs([layer] * 3, [1, 2])]
    [1.0, 2.0]
    """
    if sum(sizes) != len(costs) or min(sizes, default=0) < 1:
        raise ValueError(f"stage_costs: sizes={list(sizes)} must be one or more each, {len(costs)} layers together")
    stages, rest = [], list(costs)
    for size in sizes:
        stage, *others = rest[:size]
        for cost in others:
            stage = stage + cost
        stages.append(stage)
        del rest[:size]
    return stages


_Run = Callable[[], Any]


def _walk(chain: Sequence[tuple[str, nn.Module]], x: Any, measure: Callable[..., Any]) -> list[Any]:
    """``measure(layer, run, inputs)`` for each layer: ``run()`` calls it, and ``inputs`` are leaves of autograd."""
    measured, kept = [], dict[str, torch.Tensor]()
    for _, layer in chain:
        leaf = _map_tensors(x, _leaf)
        skipped = {layer.name: _leaf(kept[layer.name])} if isinstance(layer, Pop) else {}
        x = _map_tensors(leaf, torch.clone) if getattr(layer, "inplace", False) else leaf
        inputs = [*_tensors(leaf), *skipped.values()]
        target = kept if isinstance(layer, Stash) else skipped
        x, figures = measure(layer, lambda layer=layer, x=x, kept=target: call(layer, x, kept), inputs)
        measured.append(figures)
    return measured


def _seconds(layer: nn.Module, run: _Run, inputs: list[torch.Tensor]) -> tuple[Any, tuple[float, float, float]]:
    """Seconds of the forward, of the backward to the inputs alone, and of the backward to inputs and weights."""
    output, forward = _timed(run)
    roots = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    if not roots or isinstance(layer, Stash):
        return output, (forward, 0.0, 0.0)
    ones = [torch.ones_like(root) for root in roots]

    def backward(wanted: list[Any], retain: bool) -> float:
        if not wanted:
            return 0.0
        return _timed(lambda: torch.autograd.grad(roots, wanted, ones, retain_graph=retain, allow_unused=True))[1]

    input_grad = backward(leaves, retain=bool(weights))
    both = backward([*leaves, *weights], retain=False) if weights else input_grad
    return output, (forward, input_grad, both)


def _timed(run: _Run) -> tuple[Any, float]:
    _finish()
    begin = time.perf_counter()
    result = run()
    _finish()
    return result, time.perf_counter() - begin


def _finish() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class _SavedBytes:
    """Counts the bytes that autograd keeps, each storage once over all layers, and none of the model's own."""

    def __init__(self, model: nn.Module) -> None:
        self.held = {tensor.untyped_storage().data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}

    def measure(self, layer: nn.Module, run: _Run, inputs: list[torch.Tensor]) -> tuple[Any, int]:
        new = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal new
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.held:
                self.held[storage.data_ptr()] = tensor  # so that no other gets this address
                new += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = run()
        return output, new


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Random states and buffers are afterwards what they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            for buffer, before in buffers:
                buffer.detach().copy_(before)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, tuple | list) else []


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    return type(value)(_map_tensors(each, change) for each in value) if isinstance(value, tuple | list) else value
