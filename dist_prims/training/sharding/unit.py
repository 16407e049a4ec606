"""A unit: parameters that are gathered together. A rank always keeps its shard, and the whole only while it is needed.

Between its uses a parameter keeps its shape, but all its elements are one NaN. A forward that reads it outside its
unit, such as a head that multiplies by the weight of an embedding in another unit, would compute NaN without an error.
An absent parameter therefore has its own class, whose ``__torch_function__`` torch calls before every operation from
Python. While it is gathered it is a plain ``Parameter``, so a forward has no additional cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module, ModuleDict, ModuleList, Parameter, ParameterDict, ParameterList

from ...torch_compat import all_gather_single, reduce_scatter_single, tree_leaves, version_of, without_torch_function

__all__: list[str] = []

# Of an absent parameter: attributes that read its values or its gradient, and methods that read neither.
_REFUSED_ATTRIBUTES = {"data", "grad", "T", "mT", "H", "mH", "real", "imag"}
_METHODS = {"size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "is_complex", "untyped_storage"}
_METHODS |= {
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "new_zeros",
    "__hash__",
    "__repr__",
}


class AbsentParameter(Parameter):
    """A parameter that is not gathered: an operation that reads its values or its gradient raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, attribute = getattr(func, "__name__", ""), getattr(getattr(func, "__self__", None), "__name__", "")
        is_attribute = name in ("__get__", "__set__", "__delete__")
        if name in _METHODS or (is_attribute and attribute not in _REFUSED_ATTRIBUTES):
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        absent: Any = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, AbsentParameter))
        raise RuntimeError(
            f"{absent.unit_name}: {attribute if is_attribute else name} reads a parameter of shape {(*absent.shape,)} "
            "that is not gathered now: the forward of its unit is not running. Make a unit of a module that contains "
            "all users of the parameter (units=[...]), or read it within gathered(). Gradients are in "
            "sharded.parameters(), which the optimizer gets. To save or copy the model, use sharded.state_dict()"
        )


class Unit:
    """Parameters of one dtype and device, all of them trained or all frozen, which one module gathers."""

    def __init__(self, name: str, model: Module, parameters: Sequence[Parameter], group: dist.ProcessGroup) -> None:
        self.name, self.parameters, self._group = name, parameters, group
        self.where = f"rank {group.rank()}: ShardedParameters: {name or 'the model'}"
        self.uses = 0  # by forwards that are running
        self.full: torch.Tensor | None = None  # all parameters, while the unit is whole
        own = {id(each) for each in parameters}
        entries = ((module, *entry) for module in model.modules() for entry in module.named_parameters(recurse=False))
        # Where modules hold the parameters: module, attribute, parameter.
        self._slots = [(module, key, each) for module, key, each in entries if id(each) in own]
        self._padding = -sum(each.numel() for each in parameters) % group.size()
        self.shard = Parameter(
            self._own_part(self._flat(parameters)).clone(), requires_grad=parameters[0].requires_grad
        )
        self.free()

    def version(self) -> int:
        """The number of changes of the shard in place."""
        return version_of(self.shard)

    def gather(self) -> torch.Tensor:
        """Gather the parameters, and return them as one flat tensor; they can be read until :meth:`free`."""
        if self.full is None:
            for module, key, each in self._slots:
                if getattr(module, key, None) is not each or each.requires_grad != self.shard.requires_grad:
                    raise ValueError(f"{self.where}: {key!r} was replaced, frozen or unfrozen; do it before sharding")
            with torch.inference_mode(False), torch.no_grad():
                full = self.shard.new_empty(self.shard.numel() * self._group.size())
                all_gather_single(full, self.shard.detach(), group=self._group)
                for parameter in self.parameters:
                    if type(parameter) is AbsentParameter:
                        parameter.__class__ = Parameter  # type: ignore[assignment]
                torch.nn.utils.vector_to_parameters(full, self.parameters)
                self.full, self._gathered_version = full, self.version()
        return self.full

    def free(self) -> None:
        """Free the whole; tensors that autograd has unpacked live as long as they are used."""
        self.full = None
        with torch.inference_mode(False):
            absent = self.shard.new_full((), float("nan") if self.shard.dtype.is_floating_point else 0)
            for parameter in self.parameters:
                parameter.data = absent.expand(parameter.shape)
                if type(parameter) is Parameter:  # a subclass is not changed, and reads as NaN
                    parameter.__class__ = AbsentParameter
                    parameter.unit_name = self.where  # type: ignore[attr-defined]

    @torch.no_grad()
    def keep_changes(self) -> None:
        """Copy changes of the whole to this rank's shard; nothing is sent, as all ranks make the same changes."""
        if not torch.equal(own := self._own_part(self._flat(self.parameters)), self.shard):
            if self.version() != self._gathered_version:
                raise RuntimeError(f"{self.where}: the shard was changed within gathered(); step the optimizer outside")
            self.shard.copy_(own)
            self._gathered_version = self.version()

    def gradients(self) -> list[torch.Tensor | None]:
        with without_torch_function():
            return [each.grad for each in self.parameters]

    @torch.no_grad()
    def reduce(self) -> None:
        """Add the mean of the ranks' gradients to the gradient of the shard, and free the gradients."""
        flat = self._flat(self.gradients()).div_(self._group.size())
        self.discard_gradients()
        own = torch.empty_like(self.shard)
        reduce_scatter_single(own, flat, group=self._group)
        self.shard.grad = own if self.shard.grad is None else self.shard.grad.add_(own)

    def discard_gradients(self) -> None:
        with without_torch_function():
            for parameter in self.parameters:
                parameter.grad = None

    def _own_part(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self._group.size(), -1)[self._group.rank()]

    @torch.no_grad()
    def _flat(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The tensors as one flat tensor, with zeros for missing ones, padded to a multiple of the number of ranks."""
        zero, pairs = self.parameters[0].new_zeros(()), zip(self.parameters, tensors, strict=True)
        pieces = [zero.expand(like.numel()) if each is None else each.to_dense().reshape(-1) for like, each in pairs]
        return torch.cat([*pieces, zero.expand(self._padding)])


def assign_units(model: Module, modules: Iterable[Module] | None) -> dict[tuple[Any, ...], list[Parameter]]:
    """Parameters by the name of the module that gathers them, and by what makes them separate flat tensors."""
    chosen = set(_children(model) if modules is None else modules)
    if foreign := chosen - set(model.modules()):
        raise ValueError(f"ShardedParameters: unit {type(foreign.pop()).__name__} is not a part of the model")
    users: dict[Parameter, list[str]] = {each: [] for each in model.parameters()}
    for name, module in model.named_modules():
        for parameter in module.parameters() if module in chosen else []:
            users[parameter].append(name)
    assigned: dict[tuple[Any, ...], list[Parameter]] = {}
    for each, by in users.items():
        # The model, whose name is empty, gathers the parameters that are in none of the modules or in several.
        key = by[0] if len(by) == 1 else "", each.dtype, each.device, each.requires_grad
        assigned.setdefault(key, []).append(each)
    return assigned


def _children(model: Module) -> Iterator[Module]:
    """The modules of a model that are called: not lists of modules, but their members."""
    for child in model.children():
        if isinstance(child, ModuleList | ModuleDict):
            yield from _children(child)
        elif not isinstance(child, ParameterList | ParameterDict):
            yield child
