"""Changes of a model after its averager was made: modules and parameters that it gets, and wrappers around it.

torch calls hooks when a module gets a parameter or another module, so a step costs nothing. The first gradient of a new
parameter shows that it is trained without being averaged. DistributedDataParallel and FullyShardedDataParallel get the
model in their constructor, which raises then.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Collection, MutableMapping

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from .gradient_hook import hook_gradient
from .ownership import averager_of, listed
from .torch_averaging import kind_of_averaging

__all__: list[str] = []

_watched: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[ModelWatch]] = weakref.WeakKeyDictionary()


class ModelWatch:
    """Observes the model of an averager until :meth:`end`; the averager keeps it alive."""

    def __init__(self, model: torch.nn.Module, rank: int) -> None:
        self.rank = rank
        self._model = model
        self._has_warned = False
        self.in_use = True
        # New parameters, and the handles of their hooks; a tensor as a key of a WeakKeyDictionary would be compared.
        self._awaited: MutableMapping[torch.Tensor, RemovableHandle | None] = WeakIdKeyDictionary()
        _install_hooks()
        self.add(model)

    def end(self) -> None:
        self.in_use = False
        for handle in self._awaited.values():
            if handle is not None:
                handle.remove()
        self._awaited.clear()

    def add(self, module: torch.nn.Module) -> None:
        """Observe this module and those in it."""
        reference = weakref.ref(self)
        for each in module.modules():
            _watched[each] = reference

    def await_gradient(self, parameter: torch.Tensor) -> None:
        """Warn when a new parameter gets a gradient, unless it has an averager by then."""
        if averager_of(parameter) is None and parameter not in self._awaited:
            hook = functools.partial(_new_parameter_has_gradient, weakref.ref(self))
            self._awaited[parameter] = hook_gradient(parameter, hook)

    def warn(self, parameter: torch.Tensor) -> None:
        """Name the parameters without an averager, once, if this one is still a parameter of the model."""
        if self._has_warned or not self.in_use or averager_of(parameter) is not None:
            return
        new = {name: each for name, each in self._model.named_parameters() if averager_of(each) is None}
        if any(each is parameter for each in new.values()):
            self._has_warned = True
            warnings.warn(
                f"rank {self.rank}: GradientAverager: the model got {listed([*new])} after the averager was made. "
                "Their gradients are never averaged, so the values differ by rank from now on. Call remove() on every "
                "rank, and make a new GradientAverager of the model",
                stacklevel=2,
            )


@functools.cache
def _install_hooks() -> None:
    register_module_module_registration_hook(_module_added)
    register_module_parameter_registration_hook(_parameter_added)


def _watch_of(module: torch.nn.Module) -> ModelWatch | None:
    reference = _watched.get(module)
    watch = reference() if reference else None
    return watch if watch and watch.in_use else None


def _module_added(parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
    if child is None:
        return
    if kind := kind_of_averaging(parent):
        _refuse_wrapper(kind, child, vars(parent).get("parameters_to_ignore", ()))
    if watch := _watch_of(parent):
        for parameter in child.parameters():
            watch.await_gradient(parameter)
        for module in child.modules():
            if _watch_of(module) is None:
                watch.add(module)


def _parameter_added(parent: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
    if parameter is not None and (watch := _watch_of(parent)):
        watch.await_gradient(parameter)


def _refuse_wrapper(kind: str, model: torch.nn.Module, ignored: Collection[str]) -> None:
    """ValueError if a wrapper gets a model with an averager, but for parameters that the wrapper ignores."""
    for name, module in model.named_modules():
        own = {f"{name}.{each}".removeprefix(".") for each, _ in module.named_parameters(recurse=False)}
        watch = _watch_of(module)
        # FullyShardedDataParallel has taken the parameters from the module: ``own`` is empty, and so is ``ignored``.
        if watch and not (ignored and own <= {*ignored}):
            raise ValueError(
                f"rank {watch.rank}: {kind}: a GradientAverager averages the gradients of this model already, and both "
                "together would divide them twice. Use one of the two: call remove() of the averager on every rank "
                f"before the {kind} is made"
            )


def _new_parameter_has_gradient(reference: weakref.ref[ModelWatch], parameter: torch.Tensor) -> None:
    if watch := reference():
        watch.warn(parameter)
