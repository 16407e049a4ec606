"""Before the first step: every rank has the same model, in structure and in values.

Ranks whose models differ would pair the gradient of one layer with that of another, and gloo would add them without a
word. So structures are compared first, by checksum; only if these differ does anybody send more.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from ...collectives.flat import cut

__all__ = ["compare", "spread"]

_PIECE = 25 * 2**20  # bytes of one broadcast


def compare(model: torch.nn.Module, settings: str, group: dist.ProcessGroup, problem: ValueError | None = None) -> str:
    """A new name, the same on all ranks. ValueError on every rank if one of them has a ``problem``, or, with the first
    difference, unless all have the same model and settings.

    >>> len(compare(torch.nn.Linear(2, 1), "bucket_mb=25", dist.group.WORLD))
    33
    """
    mine = [settings, *_described("parameter", model.named_parameters()), *_described("buffer", model.named_buffers())]
    digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    everyones = _gathered((digest, secrets.token_hex(8), str(problem or "")), group)
    if problem is not None:
        raise problem
    for rank, (_, _, failed) in enumerate(everyones):
        if failed:
            raise ValueError(f"rank {group.rank()}: GradientAverager: rank {rank} cannot make one: {failed}")
    if len({each[0] for each in everyones}) == 1:
        return f"GradientAverager-{everyones[0][1]}"
    for one, theirs in enumerate(lists := _gathered(mine, group)):
        for here, there in zip_longest(lists[0], theirs, fillvalue="nothing more"):
            if here != there:
                raise ValueError(
                    f"rank {group.rank()}: GradientAverager: the models differ: rank 0 has {here}, rank {one} has "
                    f"{there}; build the same model, with the same settings, on every rank"
                )
    raise AssertionError("two lists that have the same items have the same digest")


def _described(kind: str, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
    for name, each in named:
        grad = f", requires_grad={each.requires_grad}" if kind == "parameter" else ""
        yield f"{kind} {name!r} ({each.dtype}, shape {tuple(each.shape)}, strides {each.stride()}{grad})"


def _gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


@torch.no_grad()
def spread(tensors: Iterable[torch.Tensor], source: int, group: dist.ProcessGroup) -> None:
    """Give every rank the values of one of them. They travel as bytes, many tensors in one piece, so that every dtype
    does."""
    pieces: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        waiting = pieces.setdefault(tensor.device, [])
        if waiting and sum(each.nbytes for each in waiting) + tensor.nbytes > _PIECE:
            _send(waiting, source, group)
            waiting.clear()
        waiting.append(tensor)
    for waiting in pieces.values():
        _send(waiting, source, group)


def _send(tensors: Sequence[torch.Tensor], source: int, group: dist.ProcessGroup) -> None:
    piece = torch.cat([each.detach().contiguous().view(-1).view(torch.uint8) for each in tensors])
    dist.broadcast(piece, group=group, group_src=source)
    if group.rank() != source:
        for tensor, data in zip(tensors, cut(piece, [each.nbytes for each in tensors]), strict=True):
            tensor.copy_(data.clone().view(tensor.dtype).view(tensor.shape))  # cloned: aligned for its dtype
