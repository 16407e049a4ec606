"""States as what a file may hold: tensors on the CPU and plain values, which load without running anything.

``torch.save`` takes any object, and it is the load with ``weights_only=True`` that fails, a day later. So a state is
looked through when it is saved, and what would not load is refused by name.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from ..data import ShardedIterable, ShardedSampler

__all__ = ["Stateful", "Target", "change", "is_stream", "leaves", "load", "plain", "state_of"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
Path = tuple[Any, ...]


class Stateful(Protocol):
    """A module, an optimizer, a scheduler, a sampler, anything with these two."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


Target = Stateful | torch.Tensor | torch.Generator


def is_stream(target: Target) -> bool:
    """Whether it takes the states of all ranks, and goes on with them on any number."""
    return isinstance(target, ShardedSampler | ShardedIterable)


def state_of(target: Target) -> Any:
    """Its state as it is now, not copied."""
    if isinstance(target, torch.Generator):
        return target.get_state()
    return target.detach() if isinstance(target, torch.Tensor) else target.state_dict()


def load(name: str, target: Target, state: Any) -> None:
    """Give a state back; a tensor is filled in its place, wherever that is."""
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
    """``state`` on the CPU, in containers of its own; ValueError where a part of it would not load.

    >>> plain("x", {"a": [torch.ones(4)[:1], 2]})
    {'a': [tensor([1.]), 2]}
    >>> plain("x", {"a": [len]})
    Traceback (most recent call last):
    ValueError: 'x' holds a builtin_function_or_method at ['a', 0]; only tensors and plain values can be loaded
    """
    return change(state, lambda path, tensor: _compact(tensor), lambda path, value: _refuse(name, path, value))


def leaves(state: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors of a plain state, with where they are.

    >>> [path for path, _ in leaves({"a": [torch.ones(2), 1], "b": torch.ones(1)})]
    [('a', 0), ('b',)]
    """
    found: list[tuple[Path, torch.Tensor]] = []

    def note(path: Path, tensor: torch.Tensor) -> torch.Tensor:
        found.append((path, tensor))
        return tensor

    change(state, note)
    return iter(found)


def change(
    state: Any,
    to: Callable[[Path, torch.Tensor], torch.Tensor],
    refuse: Callable[[Path, Any], None] = lambda path, value: None,
    path: Path = (),
) -> Any:
    """The same state with other tensors; ``refuse`` is called with what is neither tensor nor container nor plain."""
    if isinstance(state, torch.Tensor):
        return to(path, state)
    if type(state) in (dict, OrderedDict):
        changed = copy.copy(state)  # with the versions that modules note at theirs
        for key, value in state.items():
            if type(key) not in (str, int):
                refuse((*path, key), key)
            changed[key] = change(value, to, refuse, (*path, key))
        return changed
    if type(state) in (list, tuple):
        return type(state)(change(value, to, refuse, (*path, number)) for number, value in enumerate(state))
    if type(state) not in _PLAIN:
        refuse(path, state)
    return state


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, and without the rest of a storage of which it is a view: torch.save would write that, too."""
    tensor = tensor.detach().cpu()
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _refuse(name: str, path: Path, value: Any) -> None:
    kind = type(value).__name__
    raise ValueError(f"{name!r} holds a {kind} at {list(path)}; only tensors and plain values can be loaded")


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
