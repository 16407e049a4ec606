"""One stage at work: forward, backward and gradients of the weights of its micro-batches, and what it keeps between.

A micro-batch enters a stage by a function of its own, so that autograd stops there and says what it found; and since
what enters is then no leaf, a stage may begin with an operation in place, such as ``ReLU(inplace=True)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .backward import Later, same_memory, split_backward
from .batch_norm import DeferredBatchNorm, commit_batch_norm
from .running_statistics import RunningStatistics

__all__ = ["Loss", "Tensors", "Worker", "as_tuple"]

Tensors = tuple[torch.Tensor, ...]
Loss = Callable[[Tensors], torch.Tensor]


def as_tuple(found: Any, what: str) -> Tensors:
    """A tensor, or a sequence of them, as a tuple.

    >>> as_tuple(torch.ones(1), "an input")
    (tensor([1.]),)
    """
    several = (found,) if isinstance(found, torch.Tensor) else found
    if not isinstance(several, (tuple, list)) or not all(isinstance(each, torch.Tensor) for each in several):
        raise TypeError(f"{what} is a {type(found).__name__}; it must be a tensor or a tuple of tensors")
    return tuple(several)


@dataclass
class _Held:
    """What a stage keeps of a micro-batch until its backward."""

    inputs: Tensors
    loss: Loss | None
    later: Later | None
    again: _Random | None = None  # to be computed again, beginning with these random numbers
    roots: Tensors = ()  # where the backward begins
    wanted: tuple[bool, ...] = ()  # of each, whether a gradient is to come for it
    found: list[torch.Tensor | None] = field(default_factory=list)  # the gradients of the inputs

    def enter(self) -> Tensors:
        if not (torch.is_grad_enabled() and any(each.requires_grad for each in self.inputs)):
            return self.inputs
        needs = [each.requires_grad for each in self.inputs]
        device = self.inputs[0].device
        anchor = torch.empty(0, device=device, requires_grad=True)
        entered: Tensors = _Enter.apply(anchor, self.found, needs, *(each.detach() for each in self.inputs))  # type: ignore[no-untyped-call]
        return entered


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, found: list[torch.Tensor | None], needs: list[bool], *inputs: torch.Tensor
    ) -> Tensors:
        ctx.found = found  # and not what holds it, and the graph: memory in a circle is not let go
        ctx.set_materialize_grads(False)
        entered = tuple(same_memory(each) for each in inputs)
        ctx.mark_non_differentiable(*(each for each, need in zip(entered, needs, strict=True) if not need))
        return entered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.found[:] = grads
        return (None,) * (3 + len(grads))


class Worker:
    """A stage of a model, number ``stage``. ``loss``: what judges its output, where that is a module, too."""

    def __init__(self, module: torch.nn.Module, stage: int, loss: torch.nn.Module | None = None) -> None:
        self.module = module
        self.trained = torch.nn.ModuleList([module] if loss is None else [module, loss])
        self.stage = stage
        self.statistics = RunningStatistics(self.trained)
        self._refuse_other_averaging()
        self._held: dict[int, _Held] = {}
        self._later: dict[int, Later] = {}

    def infer(self, inputs: Tensors) -> Tensors:
        """The outputs, and nothing is kept."""
        return as_tuple(self.module(*inputs), f"the output of stage {self.stage}")

    def forward(
        self, micro: int, inputs: Tensors, *, split: bool = False, again: bool = False, loss: Loss | None = None
    ) -> Tensors:
        """The outputs, which go on to ``loss`` if there is one. ``split``: there will be :meth:`weights`; ``again``:
        keep the inputs only, and compute the rest again when the gradient comes."""
        held = self._held[micro] = _Held(inputs, loss, Later() if split else None)
        if not again:
            with self.statistics.collected():
                outputs = self._run(held)
            held.wanted = tuple(each.requires_grad or loss is not None for each in held.roots)
            return outputs
        held.again = _Random.now(inputs)
        versions = [each._version for each in inputs]
        with torch.no_grad(), self.statistics.collected():
            outputs = self._run(held)
        if versions != [each._version for each in inputs]:
            raise RuntimeError(
                f"stage {self.stage} changes its input in place, and so cannot be computed again from it; "
                "let its first layer have inplace=False, or the pipeline checkpoint=False"
            )
        # A loss may learn what is nowhere here, such as the targets.
        learns = loss is not None or any(each.requires_grad for each in (*inputs, *self.module.parameters()))
        held.wanted = tuple(learns and _is_differentiable(each) for each in held.roots)
        held.roots = ()
        return tuple(each.detach().requires_grad_(learns and _is_differentiable(each)) for each in outputs)

    def backward(self, micro: int, grads: Sequence[torch.Tensor | None]) -> Tensors:
        """The gradients of the inputs that require one, from those of such outputs; for the loss it is (None,)."""
        with self.statistics.frozen():
            return self._backward(micro, self._held.pop(micro), grads)

    def _backward(self, micro: int, held: _Held, grads: Sequence[torch.Tensor | None]) -> Tensors:
        if held.again is not None:
            with held.again.repeated(), torch.enable_grad():
                self._run(held)
        wanted = [root for root, want in zip(held.roots, held.wanted, strict=True) if want]
        pairs = [(root, grad) for root, grad in zip(wanted, grads, strict=True) if root.requires_grad]
        if pairs:
            with torch.autocast(pairs[0][0].device.type, enabled=False):  # the forward has said which types
                torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])
        if held.later is not None:
            self._later[micro] = held.later
        found = held.found or [None] * len(held.inputs)
        return tuple(
            torch.zeros_like(each) if grad is None else grad
            for each, grad in zip(held.inputs, found, strict=True)
            if each.requires_grad
        )

    def weights(self, micro: int) -> None:
        """The gradients that a split backward has left."""
        self._later.pop(micro).drain()

    def commit(self, short: bool) -> None:
        """End the batch; ``short``: it had fewer micro-batches than the plan."""
        self.statistics.commit()
        if short:
            commit_batch_norm(self.trained)

    def forget(self) -> None:
        """Let go of all micro-batches of a step that failed."""
        self.statistics.forget()
        self._held.clear()
        self._later.clear()
        for each in self.trained.modules():
            if isinstance(each, DeferredBatchNorm):
                each.forget()

    def _refuse_other_averaging(self) -> None:
        for name, each in self.module.named_modules():
            if isinstance(each, DistributedDataParallel):
                raise ValueError(
                    f"pipeline: {f'{name} in ' if name else ''}stage {self.stage} is a DistributedDataParallel, which "
                    "counts on one backward after each forward, and gives wrong means of those of several "
                    "micro-batches. Give the stage without it (.module), and average once a step: "
                    "dist_prims.GradientAverager(pipeline.module, group=...)"
                )

    def _run(self, held: _Held) -> Tensors:
        with split_backward(held.later) if held.later is not None else nullcontext():
            outputs = self.infer(held.enter())
            held.roots = outputs if held.loss is None else (held.loss(outputs),)
        return outputs


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@dataclass(frozen=True)
class _Random:
    """Where the random numbers stand, of the processor and of the device of a stage."""

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
        """Within it the random numbers are those again that came then."""
        with torch.random.fork_rng([] if self.device is None else [self.device]):
            torch.set_rng_state(self.processor)
            if self.device is not None and self.of_device is not None:
                torch.cuda.set_rng_state(self.of_device, self.device)
            yield
