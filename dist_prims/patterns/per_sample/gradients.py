"""Gradients of each sample's own loss, and their norms.

The backward of a batch gives only the sum of the gradients, and one sample at a time is slow. vmap(grad) computes all
gradients at once, but each takes the memory of a weight. Their norms take less: they follow from the layer's input and
the gradient of its output (Goodfellow 2015), which an ordinary backward computes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call, grad_and_value, vmap

from ...torch_compat import InstanceNorm, Norm, tree_leaves, tree_map
from .factors import Part, joined
from .recorder import Recorder, Use

__all__: list[str] = []

METHODS = ("trick", "vmap", "loop")
Tensors = dict[str, torch.Tensor]


class PerSampleGradients:
    """Gradients of ``loss(model(x), y)`` for each sample of a batch, or their norms.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> samples = PerSampleGradients(model, torch.nn.functional.mse_loss)
    >>> _ = torch.nn.init.ones_(model.weight)
    >>> x, y = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([[7.5], [1.5]])  # 0.5 more than the output
    >>> samples.norms(x, y)  # the gradient is -2 * 0.5 * x
    tensor([5., 1.])
    >>> samples.gradients(x, y)["weight"]
    tensor([[[-3., -4.]],
    <BLANKLINE>
            [[ 0., -1.]]])

    ``of`` names layers or parameters, such as ``"conv2"`` or ``["fc", "embedding.weight"]``; None: all that require a
    gradient. Any name of a tied weight is accepted; results have its first name. Each sample passes through the model
    as a batch of one, and the loss is that of one sample, as in ``loss(model(x[i : i + 1]), y[i : i + 1])``.
    ``inputs`` may be a tuple, if the model takes several. The parameters' ``.grad`` do not change.

    ``method`` is one of

    - "trick": the norm trick for linear and convolution layers, embeddings and norms; vmap for every other use of a
      parameter, such as attention's projections. If the model draws random numbers and one parameter needs vmap, all
      are computed by vmap, so that they are gradients of one loss.
    - "vmap": vmap for all. An LSTM needs it, and a model that calls ``torch.autograd.grad``, as for a gradient penalty.
    - "loop": one sample at a time. A GRU and a layer that is recomputed in the backward (checkpoint) need it.

    A model that a method does not support raises torch's error. Batch norms must be in evaluation mode: in training
    mode they mix the samples.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[Any, Any], torch.Tensor],
        of: str | Sequence[str] | None = None,
        *,
        method: str = "trick",
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"PerSampleGradients: method={method!r}; choose one of {', '.join(METHODS)}")
        self.model, self.loss, self.method = model, loss, method
        self.names = _chosen(model, [of] if isinstance(of, str) else of)
        for name, dtype in zip(self.names, self._dtypes(), strict=True):
            if dtype.is_complex:
                raise ValueError(
                    f"PerSampleGradients: {name!r} is {dtype}; the gradients of complex parameters are not "
                    "supported; name other parameters with of="
                )

    def norms(self, inputs: Any, targets: Any) -> torch.Tensor:
        """For each sample the norm of its gradient, over all chosen parameters together."""
        return self.norms_and_losses(inputs, targets)["norms"]

    def norms_and_losses(self, inputs: Any, targets: Any) -> Tensors:
        """``{"norms": ..., "losses": ...}``, which cost no more than the norms."""
        count = self._count(inputs, targets)
        wide = functools.reduce(torch.promote_types, self._dtypes(), torch.float32)
        if count == 0:
            nothing = self._zeros(0, (), self.names[0])
            return {"norms": nothing.to(wide), "losses": nothing}
        losses, squares = self._run(inputs, targets, lambda part: part.squares(), lambda each: _squares(each))
        total = torch.zeros(count, dtype=wide, device=losses.device)
        for values in squares.values():
            total = total + values
        return {"norms": total.sqrt(), "losses": losses}

    def gradients(self, inputs: Any, targets: Any) -> Tensors:
        """For each chosen parameter the gradients of all samples, of shape ``(samples, *parameter.shape)``."""
        count = self._count(inputs, targets)
        shapes = {name: self.model.get_parameter(name).shape for name in self.names}
        if count == 0:
            return {name: self._zeros(0, shape, name) for name, shape in shapes.items()}
        _, found = self._run(inputs, targets, lambda part: part.gradient(), lambda each: each)
        return {
            name: found[name].reshape(count, *shape) if name in found else self._zeros(count, shape, name)
            for name, shape in shapes.items()
        }

    def _run(
        self,
        inputs: Any,
        targets: Any,
        of_part: Callable[[Part], torch.Tensor],
        of_gradient: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, Tensors]:
        """Losses, and for each parameter the result of ``of_part``, or of ``of_gradient`` if it has no factors."""
        self._check_norms()
        if self.method == "loop":
            losses, found = self._by_loop(inputs, targets, of_gradient)
            return losses, found
        found, rest = {}, self.names
        if self.method == "trick":
            before = self._random_states()
            losses, found, rest = self._by_trick(inputs, targets, of_part)
            if rest and not all(map(torch.equal, before, self._random_states())):
                found, rest = {}, self.names  # another run would draw another dropout mask
        if rest:
            gradients, losses = self._by_vmap(inputs, targets, rest)
            found |= {name: of_gradient(each) for name, each in gradients.items()}
        return losses, found

    def _by_trick(
        self, inputs: Any, targets: Any, wanted: Callable[[Part], torch.Tensor]
    ) -> tuple[torch.Tensor, Tensors, list[str]]:
        """Losses, the result for each parameter that only known layers use, and the names of the others."""
        parameters = self._detached(self.names)
        names = {id(parameter): name for name, parameter in parameters.items()}
        uses: list[Use] = []

        def one(zero: torch.Tensor, x: Any, y: Any) -> torch.Tensor:
            with Recorder(names, zero, uses):
                return self._loss(parameters, x, y)

        count, device = self._count(inputs, targets), next(iter(parameters.values())).device
        zeros = torch.zeros(count, device=device, requires_grad=True)
        with torch.enable_grad():
            losses: torch.Tensor = vmap(one, randomness="different")(zeros, inputs, targets)
            total = losses.sum()
        if not losses.requires_grad:
            return losses, {}, []
        asked = [use.edge for use in uses] + [get_gradient_edge(parameter) for parameter in parameters.values()]
        grads = torch.autograd.grad(total, asked, allow_unused=True)
        rest = {name for name, other in zip(parameters, grads[len(uses) :], strict=True) if other is not None}
        with torch.no_grad():
            found, mixed = _gathered(uses, [*grads[: len(uses)]], rest, wanted)
        return losses.detach(), found, [name for name in self.names if name in rest | mixed]

    def _by_vmap(self, inputs: Any, targets: Any, names: list[str]) -> tuple[Tensors, torch.Tensor]:
        def one(parameters: Tensors, x: Any, y: Any) -> torch.Tensor:
            return self._loss(parameters, x, y)

        both = vmap(grad_and_value(one), in_dims=(None, 0, 0), randomness="different")
        found: tuple[Tensors, torch.Tensor] = both(self._detached(names, False), inputs, targets)
        return found

    def _by_loop(
        self, inputs: Any, targets: Any, wanted: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, Tensors]:
        losses, rows = [], []
        for number in range(self._count(inputs, targets)):
            parameters = self._detached(self.names)
            x, y = (tree_map(lambda each, n=number: each[n], given) for given in (inputs, targets))
            with torch.enable_grad():
                loss = self._loss(parameters, x, y)
            losses.append(loss.detach())
            if loss.requires_grad:
                found = torch.autograd.grad(loss, [*parameters.values()], materialize_grads=True)
            else:  # it depends on no chosen parameter
                found = tuple(map(torch.zeros_like, parameters.values()))
            rows.append([wanted(each.detach().unsqueeze(0)) for each in found])
        return torch.stack(losses), dict(zip(self.names, map(torch.cat, zip(*rows, strict=True)), strict=True))

    def _loss(self, parameters: Tensors, x: Any, y: Any) -> torch.Tensor:
        """The loss of one sample, as a batch of one."""
        batch, target = (tree_map(lambda each: each.unsqueeze(0), given) for given in (x, y))
        output = functional_call(self.model, parameters, batch if isinstance(batch, tuple) else (batch,))
        loss = self.loss(output, target)
        if loss.numel() != 1:
            raise ValueError(
                f"PerSampleGradients: the loss of a sample has shape {tuple(loss.shape)}; it must be one number"
            )
        return loss.reshape(())

    def _detached(self, names: Sequence[str], requires_grad: bool = True) -> Tensors:
        return {name: self.model.get_parameter(name).detach().requires_grad_(requires_grad) for name in names}

    def _zeros(self, count: int, shape: Sequence[int], name: str) -> torch.Tensor:
        return self.model.get_parameter(name).new_zeros(count, *shape)

    def _dtypes(self) -> Iterator[torch.dtype]:
        return (self.model.get_parameter(name).dtype for name in self.names)

    def _random_states(self) -> list[torch.Tensor]:
        device = self.model.get_parameter(self.names[0]).device
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]

    def _count(self, inputs: Any, targets: Any) -> int:
        lengths = {len(each) for each in tree_leaves((inputs, targets))}
        if len(lengths) != 1:
            raise ValueError(
                f"PerSampleGradients: inputs and targets have {sorted(lengths)} samples; give equally many"
            )
        return lengths.pop()

    def _check_norms(self) -> None:
        for name, module in self.model.named_modules():
            if isinstance(module, Norm) and module.training:
                instance = isinstance(module, InstanceNorm)
                if not instance or module.track_running_stats:
                    raise ValueError(
                        f"PerSampleGradients: {type(module).__name__} {name!r} is in training mode, where it mixes the "
                        f"samples of a batch or changes its buffers; call model.eval(), or {name}.eval()"
                    )


def _gathered(
    uses: list[Use], grads: list[torch.Tensor | None], rest: set[str], wanted: Callable[[Part], torch.Tensor]
) -> tuple[Tensors, set[str]]:
    """The results for each parameter, and the names of the parameters without one.

    Tensors are freed as soon as possible, the last layer's first.
    """
    counts = Counter(name for use in uses for name in (use.weight, use.bias))
    waiting: dict[str, list[Part]] = {}
    found: Tensors = {}
    mixed: set[str] = set()
    while uses:
        use, grad = uses.pop(), grads.pop()
        names = [None if name in rest else name for name in (use.weight, use.bias)]
        parts = (None, None) if grad is None or names == [None, None] else use.parts(grad)
        for name, part in zip(names, parts, strict=True):
            if name is None:
                continue
            waiting.setdefault(name, []).extend([] if part is None else [part])
            counts[name] -= 1
            if counts[name] == 0 and (all_parts := waiting.pop(name)):
                if (whole := joined(all_parts)) is None:
                    mixed.add(name)
                else:
                    found[name] = wanted(whole)
    return found, mixed


def _squares(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32)).square().flatten(1).sum(1)


def _chosen(model: torch.nn.Module, of: Sequence[str] | None) -> list[str]:
    """The names of the chosen parameters; a layer stands for all parameters in it."""
    if of is None:
        found = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not found:
            raise ValueError("PerSampleGradients: no parameter of the model requires a gradient; name some with of=")
        return found
    if not of:
        raise ValueError("PerSampleGradients: of=[] chooses no parameter; None chooses all that require a gradient")
    named = [*model.named_parameters(remove_duplicate=False)]  # a tied weight has several names
    chosen: set[int] = set()
    for each in of:
        ids = {id(parameter) for name, parameter in named if name == each or name.startswith(f"{each}.")}
        if not ids:
            known = [name for name, _ in named]
            raise ValueError(f"PerSampleGradients: of={each!r} is no layer and no parameter; there are {known}")
        chosen |= ids
    return [name for name, parameter in model.named_parameters() if id(parameter) in chosen]
