"""Transfer of a state, as objects with tensors in them, from one rank to others that have none of its structure.

The state is sent in two parts: its structure as plain values, with the number of a tensor in place of the tensor, and
the bytes of the tensors in pieces. A rank that does not need the state takes part in the collectives and keeps nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..agreement import broadcast_value
from ..collectives.flat import cut

__all__: list[str] = []

_PIECE = 25 * 2**20  # bytes of one broadcast
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


@dataclass(frozen=True)
class _TensorSpec:
    """What is known of a tensor before it is received."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: str  # its type

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def transfer(state: Any, source: int, group: dist.ProcessGroup, take: bool) -> Any:
    """Return the ``state`` of rank ``source`` on the ranks that ``take`` it, with tensors on the same type of device.

    All ranks of the group call this; only the state of ``source`` is used. If it has an object that is neither a tensor
    nor plain (see plain_values.py), that rank raises TypeError, and the others raise MismatchError.

    >>> transfer({"a": [torch.ones(2), 3]}, 0, dist.group.WORLD, take=True)
    {'a': [tensor([1., 1.]), 3]}
    """
    tensors: list[torch.Tensor] = []
    sent: Any = None
    if group.rank() == source:
        structure = _structure(state, tensors)
        sent = structure, [(each.shape, each.dtype, each.device.type) for each in tensors]
    structure, described = broadcast_value(sent, source, group)
    received = _broadcast([_TensorSpec(*each) for each in described], tensors, source, group, take)
    return _with_tensors(structure, received) if take else None


def _structure(state: Any, tensors: list[torch.Tensor]) -> Any:
    """The state as plain values; the tensors are appended to the list."""
    if type(state) in (torch.Tensor, torch.nn.Parameter):
        tensors.append(state.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(state, dict):  # one of another type arrives as a dict
        kind = next((name for name, each in _MAPPINGS.items() if each is type(state)), "dict")
        items = [(key, _structure(value, tensors)) for key, value in state.items()]
        attributes = _structure(getattr(state, "__dict__", None), tensors)  # the versions of modules
        return {"mapping": kind, "items": items, "attributes": attributes}
    if type(state) in (list, tuple):
        return type(state)(_structure(value, tensors) for value in state)
    return state


def _with_tensors(structure: Any, tensors: dict[int, torch.Tensor]) -> Any:
    """The state whose structure this is."""
    if isinstance(structure, list | tuple):
        return type(structure)(_with_tensors(value, tensors) for value in structure)
    if not isinstance(structure, dict):
        return structure
    if "tensor" in structure:
        return tensors[structure["tensor"]]
    state = _MAPPINGS[structure["mapping"]]()
    for key, value in structure["items"]:
        state[key] = _with_tensors(value, tensors)
    if structure["attributes"] is not None and hasattr(state, "__dict__"):
        vars(state).update(_with_tensors(structure["attributes"], tensors))
    return state


def _broadcast(
    specs: Sequence[_TensorSpec], tensors: Sequence[torch.Tensor], source: int, group: dist.ProcessGroup, take: bool
) -> dict[int, torch.Tensor]:
    """Send the tensors of these specs, in pieces of one device type; return them by number, if ``take``."""
    received: dict[int, torch.Tensor] = {}
    for numbers in _pieces(specs):
        sizes = [specs[number].nbytes for number in numbers]
        if group.rank() == source:
            piece = torch.cat([tensors[number].contiguous().view(-1).view(torch.uint8) for number in numbers])
        else:
            piece = torch.empty(sum(sizes), dtype=torch.uint8, device=specs[numbers[0]].device)
        dist.broadcast(piece, group=group, group_src=source)
        if take:
            for number, data in zip(numbers, cut(piece, sizes), strict=True):
                spec = specs[number]
                received[number] = data.clone().view(spec.dtype).view(spec.shape)  # cloned: aligned for its dtype
    return received


def _pieces(specs: Sequence[_TensorSpec]) -> list[list[int]]:
    """The numbers of the tensors of each piece."""
    pieces: list[list[int]] = []
    for device in dict.fromkeys(spec.device for spec in specs):
        filled = _PIECE + 1  # bytes in the last piece
        for number, spec in enumerate(specs):
            if spec.device == device:
                if filled + spec.nbytes > _PIECE:
                    pieces.append([])
                    filled = 0
                pieces[-1].append(number)
                filled += spec.nbytes
    return pieces
