"""Conversion of states to tensors on the CPU and plain values, which load without running code.

``torch.save`` accepts any object, and the load with ``weights_only=True`` fails much later. A state is therefore
checked when it is saved, and an error names a value that could not be loaded.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from ..data import ShardedIterable, ShardedSampler

__all__: list[str] = []

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
Path = tuple[Any, ...]


class Stateful(Protocol):
    """A module, an optimizer, a scheduler, a sampler, or another object with these two methods."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


Target = Stateful | torch.Tensor | torch.Generator


def is_stream(target: Target) -> bool:
    """Whether the target loads the states of all ranks, on any number of ranks."""
    return isinstance(target, ShardedSampler | ShardedIterable)


def is_collective(target: Target) -> bool:
    """Whether ``state_dict()`` communicates, so that all ranks must call it."""
    return bool(getattr(target, "collective_state_dict", False))


def state_of(target: Target) -> Any:
    """The current state, not copied."""
    if isinstance(target, torch.Generator):
        return target.get_state()
    return target.detach() if isinstance(target, torch.Tensor) else target.state_dict()


def load(name: str, target: Target, state: Any) -> None:
    """Load a state; a tensor is filled in place, on its device."""
    if isinstance(target, torch.Generator):
        target.set_state(state)
    elif not isinstance(target, torch.Tensor):
        target.load_state_dict(state)
    elif state.shape != target.shape or state.dtype != target.dtype:
        raise ValueError(
            f"{name!r} is {_kind(state)} in the checkpoint and {_kind(target)} here; make it as it was saved"
        )
    else:
        with torch.no_grad():
            target.copy_(state)


def plain(name: str, state: Any) -> Any:
    """``state`` on the CPU, in new containers; ValueError if a part of it could not be loaded.

    >>> plain("x", {"a": [torch.ones(4)[:1], 2]})
    {'a': [tensor([1.]), 2]}
    >>> plain("x", {"a": [len]})
    Traceback (most recent call last):
    ValueError: 'x' holds a builtin_function_or_method at ['a', 0]; only tensors and plain values can be loaded
    """
    return change(name, state, lambda path, tensor: _compact(tensor))


def leaves(name: str, state: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors of a state, each with its path.

    >>> [path for path, _ in leaves("x", {"a": [torch.ones(2), 1], "b": torch.ones(1)})]
    [('a', 0), ('b',)]
    """
    found: list[tuple[Path, torch.Tensor]] = []

    def note(path: Path, tensor: torch.Tensor) -> torch.Tensor:
        found.append((path, tensor))
        return tensor

    change(name, state, note)
    return iter(found)


def change(name: str, state: Any, to: Callable[[Path, torch.Tensor], torch.Tensor], path: Path = ()) -> Any:
    """The state with ``to(path, tensor)`` for each tensor; ValueError for values that could not be loaded."""
    if type(state) in (torch.Tensor, torch.nn.Parameter):
        return to(path, state)
    if type(state) in (dict, OrderedDict, Counter):
        changed = copy.copy(state)  # with its attributes: the versions of modules
        for key, value in state.items():
            if type(key) not in (str, int) or _too_long(key):
                _refuse(name, (*path, key), key)
            changed[key] = change(name, value, to, (*path, key))
        return changed
    if type(state) in (list, tuple):
        return type(state)(change(name, value, to, (*path, number)) for number, value in enumerate(state))
    if type(state) not in _PLAIN or _too_long(state):
        _refuse(name, path, state)
    return state


def whole_number(value: Any, what: str) -> int:
    """``value`` as an int; ValueError for other types, including 2.0 and True.

    >>> whole_number(torch.tensor(3), "step")
    3
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{what} {value!r} is a {type(value).__name__}; give a whole number, an int") from None


def _too_long(value: Any) -> bool:
    return type(value) is int and value.bit_length() > 2039  # weights_only refuses longer ones


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU; a view is copied, because torch.save would write its whole storage."""
    tensor = tensor.detach().cpu()
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _refuse(name: str, path: Path, value: Any) -> None:
    kind = type(value).__name__
    why = "only tensors and plain values can be loaded"
    if kind == "DTensor":
        why = "each rank has only a part of it; give the result of .to_local() as sharded= or own="
    elif isinstance(value, torch.Tensor):
        why = "subclasses of Tensor cannot be loaded; give .as_subclass(torch.Tensor)"
    elif type(value) is int:
        kind = f"number of {value.bit_length()} bits"
        path = tuple("…" if each is value else each for each in path)
        why = "at most 2039 bits can be loaded"
    raise ValueError(f"{name!r} holds a {kind} at {list(path)}; {why}")


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
