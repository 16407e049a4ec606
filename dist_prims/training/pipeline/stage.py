"""Execution of one stage: forward, backward and weight gradients of its micro-batches.

The inputs of a micro-batch are leaves, in which autograd stops and stores the gradients. The stage gets tensors of the
same memory that are not leaves, so it may begin with an operation in place, such as ``ReLU(inplace=True)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ...torch_compat import not_a_leaf, version_of
from ..gradients.torch_averaging import parts_that_average
from .running_statistics import RunningStatistics
from .split_backward import Later, split_backward

__all__: list[str] = []

Tensors = tuple[torch.Tensor, ...]
Loss = Callable[[Tensors], tuple[torch.Tensor, torch.Tensor]]  # the root of the backward, and its gradient


def as_tuple(value: Any, what: str) -> Tensors:
    """A tensor, or a sequence of them, as a tuple."""
    several = (value,) if isinstance(value, torch.Tensor) else value
    if not isinstance(several, (tuple, list)) or not all(isinstance(each, torch.Tensor) for each in several):
        raise TypeError(f"{what} is a {type(value).__name__}; it must be a tensor or a tuple of tensors")
    return tuple(several)


@dataclass
class _Saved:
    """What a stage keeps of a micro-batch until its backward."""

    inputs: Tensors  # leaves, in which autograd stores the gradients
    loss: Loss | None
    later: Later | None  # where the gradients of the weights are deferred to
    again: _Random | None = None  # the random states, if the backward computes the forward again
    roots: Tensors = ()  # from which the backward begins: the outputs, or the loss
    grad: torch.Tensor | None = None  # of the loss
    wanted: tuple[bool, ...] = ()  # of each root, whether a gradient comes for it

    def stage_inputs(self) -> Tensors:
        """The tensors that the stage gets: of the same memory as the leaves, but not leaves."""
        if not (torch.is_grad_enabled() and any(each.requires_grad for each in self.inputs)):
            return tuple(each.detach() for each in self.inputs)
        return tuple(map(not_a_leaf, self.inputs))


class StageWorker:
    """A stage of a model, number ``stage``. ``loss``: the loss of its output, if that is a module, which is trained
    too."""

    def __init__(self, module: torch.nn.Module, stage: int, loss: torch.nn.Module | None = None) -> None:
        self.module = module
        self.trained = torch.nn.ModuleList([module] if loss is None else [module, loss])
        self.stage = stage
        self.statistics = RunningStatistics(self.trained)
        self._refuse_other_averaging()
        self._saved: dict[int, _Saved] = {}
        self._later: dict[int, Later] = {}

    def inputs(self) -> Iterator[torch.Tensor]:
        """The inputs of the micro-batches whose backward has not ended."""
        for saved in self._saved.values():
            yield from saved.inputs

    def infer(self, inputs: Tensors) -> Tensors:
        """The outputs; nothing is kept."""
        return as_tuple(self.module(*inputs), f"the output of stage {self.stage}")

    def forward(
        self, micro: int, inputs: Tensors, *, split: bool = False, again: bool = False, loss: Loss | None = None
    ) -> Tensors:
        """The outputs, which go on to ``loss`` if there is one. ``inputs``: leaves, without a gradient yet; ``split``:
        there will be :meth:`weights`; ``again``: keep the inputs only, and compute the rest again when the gradient
        comes."""
        # 1. With a graph: the backward needs what the forward has stored.
        saved = self._saved[micro] = _Saved(inputs, loss, Later() if split else None)
        if not again:
            with self.statistics.collected():
                outputs = self._run(saved)
            saved.wanted = tuple(each.requires_grad or loss is not None for each in saved.roots)
            return outputs
        # 2. Without one: keep the inputs and the random states, from which the backward computes the forward again.
        saved.again = _Random.now(inputs)
        versions = [version_of(each) for each in inputs]
        with torch.no_grad(), self.statistics.collected():
            outputs = self._run(saved)
        if versions != [version_of(each) for each in inputs]:
            raise RuntimeError(
                f"stage {self.stage} changes its input in place, and so cannot be computed again from it; "
                "let its first layer have inplace=False, or the pipeline checkpoint=False"
            )
        # 3. Tell the next stage which outputs will have a gradient.
        # A loss may learn other tensors, such as the targets.
        learns = loss is not None or any(each.requires_grad for each in (*inputs, *self.module.parameters()))
        saved.wanted = tuple(learns and _is_differentiable(each) for each in saved.roots)
        saved.roots = ()
        return tuple(each.detach().requires_grad_(learns and _is_differentiable(each)) for each in outputs)

    def backward(self, micro: int, grads: Sequence[torch.Tensor | None]) -> Tensors:
        """The gradients of the inputs that require one. ``grads``: the gradients of the outputs; a loss needs none."""
        with self.statistics.collected(is_recompute=True):
            input_grads = self._backward(micro, self._saved[micro], grads)
        del self._saved[micro]
        return input_grads

    def _backward(self, micro: int, saved: _Saved, grads: Sequence[torch.Tensor | None]) -> Tensors:
        # 1. Without a graph, compute the forward again.
        if saved.again is not None:
            with saved.again.repeated(), torch.enable_grad():
                self._run(saved)
        # 2. Backward from each output for which a gradient has come, or from the loss.
        wanted = [root for root, want in zip(saved.roots, saved.wanted, strict=True) if want]
        if saved.loss is not None:
            grads = (saved.grad,)
        pairs = [(root, grad) for root, grad in zip(wanted, grads, strict=True) if root.requires_grad]
        if pairs:
            device = pairs[0][0].device.type
            cast = torch.is_autocast_enabled(device)  # the forward has chosen the types
            with torch.autocast(device, enabled=False) if cast else nullcontext():
                torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])
        # 3. The gradients of the inputs are ready; the gradients of the weights may follow in weights().
        if saved.later is not None:
            self._later[micro] = saved.later
        learning = [each for each in saved.inputs if each.requires_grad]
        return tuple(torch.zeros_like(each) if each.grad is None else each.grad for each in learning)

    def weights(self, micro: int) -> None:
        """The gradients that a split backward has left."""
        self._later.pop(micro).drain()

    def forget(self) -> None:
        """Free all micro-batches of a step that failed."""
        self.statistics.forget()
        self._saved.clear()
        self._later.clear()

    def _refuse_other_averaging(self) -> None:
        for name, kind in parts_that_average(self.module):
            if kind == "DistributedDataParallel":
                raise ValueError(
                    f"pipeline: {f'{name} in ' if name else ''}stage {self.stage} is a DistributedDataParallel, which "
                    "expects one backward after each forward, and gives wrong means of those of several "
                    "micro-batches. Give the stage without it (.module), and average once a step: "
                    "dist_prims.GradientAverager(pipeline.module, group=...)"
                )

    def _run(self, saved: _Saved) -> Tensors:
        """Compute the forward, and the loss if there is one; set the roots of the backward, and return the outputs."""
        with split_backward(saved.later) if saved.later is not None else nullcontext():
            saved.roots = outputs = self.infer(saved.stage_inputs())
            if saved.loss is not None:
                root, saved.grad = saved.loss(outputs)
                saved.roots = (root,)
        return outputs


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@dataclass(frozen=True)
class _Random:
    """The random states of the CPU and of the device of a stage."""

    processor: torch.Tensor
    device: torch.device | None
    of_device: torch.Tensor | None

    @classmethod
    def now(cls, inputs: Tensors) -> _Random:
        devices = [each.device for each in inputs if each.device.type == "cuda"]
        if not devices:
            return cls(torch.get_rng_state(), None, None)
        return cls(torch.get_rng_state(), devices[0], torch.cuda.get_rng_state(devices[0]))

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Context in which the same random numbers are drawn again."""
        with torch.random.fork_rng([] if self.device is None else [self.device]):
            torch.set_rng_state(self.processor)
            if self.device is not None and self.of_device is not None:
                torch.cuda.set_rng_state(self.of_device, self.device)
            yield
