"""Tensors, and states with tensors in them, from one rank to all.

A state is sent to ranks that have none of its structure, in two parts: its structure as plain values, with the number
of a tensor in place of the tensor, and the tensors. A rank that does not need the state takes part and keeps nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..agreement import broadcast_value
from ..collectives.flat import cut

__all__: list[str] = []

_PIECE = 25 * 2**20  # bytes of one broadcast
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


@torch.no_grad()
def broadcast_coalesced(tensors: Iterable[torch.Tensor], source: int, group: dist.ProcessGroup) -> None:
    """Copy the values of rank ``source`` to every rank, many tensors in one message, as bytes: any dtype will do."""
    pieces: dict[str, list[torch.Tensor]] = {}  # by the type of device
    for tensor in tensors:
        waiting = pieces.setdefault(tensor.device.type, [])
        if waiting and sum(each.nbytes for each in waiting) + tensor.nbytes > _PIECE:
            _send(waiting, source, group)
            waiting.clear()
        waiting.append(tensor)
    for waiting in pieces.values():
        _send(waiting, source, group)


def _send(tensors: Sequence[torch.Tensor], source: int, group: dist.ProcessGroup) -> None:
    sizes, device = [each.nbytes for each in tensors], tensors[0].device
    piece = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    if group.rank() == source:
        own = [each.detach().contiguous().view(-1).view(torch.uint8).to(device) for each in tensors]
        torch.cat(own, out=piece)
    dist.broadcast(piece, group=group, group_src=source)
    if group.rank() != source:
        for tensor, data in zip(tensors, cut(piece, sizes), strict=True):
            tensor.copy_(data.clone().view(tensor.dtype).view(tensor.shape))  # cloned: aligned for its dtype


def transfer(state: Any, source: int, group: dist.ProcessGroup, take: bool) -> Any:
    """Return the ``state`` of rank ``source`` on the ranks that ``take`` it, with tensors on the same type of device.

    All ranks of the group call this; only the state of ``source`` is used. If it has an object that is neither a tensor
    nor plain (see plain_values.py), that rank raises TypeError, and the others raise MismatchError.
    """
    tensors: list[torch.Tensor] = []
    sent: Any = None
    if group.rank() == source:
        structure = _structure(state, tensors)
        sent = structure, [(each.shape, each.dtype, each.device.type) for each in tensors]
    structure, specs = broadcast_value(sent, source, group)
    if group.rank() != source:
        empty = (torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in specs)
        if not take:
            broadcast_coalesced(empty, source, group)  # a piece at a time
            return None
        tensors = [*empty]
    broadcast_coalesced(tensors, source, group)
    return _with_tensors(structure, tensors) if take else None


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


def _with_tensors(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
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
