"""Tensors that stages on different ranks share: each rank has a copy, and training may let the copies differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ...torch_compat import Norm
from .chain import Layers

__all__: list[str] = []

_GRADIENT = "which would get only a part of its gradient in each"
_STATISTIC = "a running statistic, which each would update with its own inputs"


class SharedTensor(NamedTuple):
    """A tensor in stages of several ranks. ``owners``: the parameter, or the norms that have the running statistic."""

    where: str
    owners: list[nn.Parameter | nn.Module]

    @property
    def change(self) -> str | None:
        """What training would do to the copies, if it changes them."""
        for owner in self.owners:
            if isinstance(owner, nn.Parameter):
                if owner.requires_grad:
                    return _GRADIENT
            elif owner.training:
                return _STATISTIC
        return None


def shared_tensors(parts: Sequence[Layers], rank_of: Sequence[int]) -> list[SharedTensor]:
    """The parameters and running statistics that stages of different ranks share. ``parts``: the layers of each stage;
    ``rank_of``: the rank of each stage."""
    uses: dict[int, list[tuple[int, str, nn.Parameter | nn.Module]]] = {}
    for stage, part in enumerate(parts):
        for key, tensor, owner in _trainable(part):
            uses.setdefault(id(tensor), []).append((stage, key, owner))
    found = []
    for (stage, key, owner), *others in uses.values():
        other = next((use for use in others if rank_of[use[0]] != rank_of[stage]), None)
        if other is not None:
            where = f"{key} in stage {stage} and {other[1]} in stage {other[0]}"
            found.append(SharedTensor(where, [owner, *(use[2] for use in others)]))
    return found


def refuse_trained(operation: str, shared: Iterable[SharedTensor], remedy: str) -> None:
    """ValueError if training changes a shared tensor."""
    for each in shared:
        if each.change:
            raise ValueError(
                f"{operation}: {each.where} are the same tensor, {each.change}; {remedy}, or freeze it "
                "(requires_grad_(False), eval()) first"
            )


def _trainable(part: Layers) -> Iterator[tuple[str, torch.Tensor, nn.Parameter | nn.Module]]:
    """Name, tensor and owner of all that training may change in some layers."""
    for name, layer in part:
        for key, parameter in layer.named_parameters(name):
            yield key, parameter, parameter
        for path, module in layer.named_modules(prefix=name):
            if isinstance(module, Norm):
                for key, buffer in module.named_buffers(path, recurse=False):
                    yield key, buffer, module
