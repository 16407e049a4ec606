"""Modules of torch that average gradients themselves: an averager must not divide the same gradients again.

A model does not know the DistributedDataParallel around it, and torch keeps no list of them. The garbage
collector finds them: an instance refers to its class. That costs 10 ms for 200,000 objects, once for each averager.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

__all__: list[str] = []

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def kind_of_averaging(module: torch.nn.Module) -> str | None:
    """The class of torch by which a module averages gradients itself; None if it does not.

    >>> kind_of_averaging(torch.nn.Linear(1, 1)) is None
    True
    """
    return next((name for name, kind in _kinds().items() if isinstance(module, kind)), None)


def parts_that_average(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """The modules in ``model``, itself included, that average gradients: name and class."""
    for name, each in model.named_modules():
        if kind := kind_of_averaging(each):
            yield name, kind


def averaging_problem(operation: str, model: torch.nn.Module, rank: int) -> ValueError | None:
    """The error if torch averages the gradient of a parameter of ``model``."""
    for name, kind in parts_that_average(model):
        return _refusal(operation, rank, f"{f'module {name!r}' if name else 'the model'} is a {kind}", kind)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if _first_averaged(names):
        gc.collect()  # a wrapper that the program has deleted may still be in a cycle
    if found := _first_averaged(names):
        name, kind = found
        return _refusal(operation, rank, f"parameter {name!r} belongs to a {kind}", kind)
    return None


def _first_averaged(names: Mapping[int, str]) -> tuple[str, str] | None:
    """Of parameters, given by their id, the first that a wrapper averages: its name, and the class of the wrapper."""
    for wrapper, kind in _instances():
        for parameter in _averaged_by(wrapper):
            if name := names.get(id(parameter)):
                return name, kind
    return None


def _refusal(operation: str, rank: int, what: str, kind: str) -> ValueError:
    remedy = (
        "make it of the model without fully_shard"
        if kind == "FSDPModule"
        else f"give {operation} the module inside, and delete the {kind} first"
    )
    return ValueError(
        f"rank {rank}: {operation}: {what}, which averages the gradients already; {operation} would divide them again. "
        f"Use one of the two: {remedy}"
    )


def _kinds() -> Mapping[str, Any]:
    """The classes by name; FSDP's only if a program has imported them."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    found: dict[str, Any] = {name: getattr(fsdp, name, None) for name in _WRAPPERS}
    found["DistributedDataParallel"] = DistributedDataParallel
    return {name: kind for name, kind in found.items() if kind is not None}


def _instances() -> Iterator[tuple[torch.nn.Module, str]]:
    """All wrappers that exist in this process."""
    for name, kind in _kinds().items():
        if name != "FSDPModule":  # no wrapper: the module itself is of this class
            referrers: list[Any] = gc.get_referrers(kind, *_subclasses(kind))
            for each in referrers:
                if isinstance(each, kind):
                    yield each, name


def _subclasses(kind: type) -> Iterator[type]:
    each: type
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _averaged_by(wrapper: torch.nn.Module) -> Iterable[torch.Tensor]:
    """The parameters that a wrapper averages; none of a wrapper whose constructor has failed."""
    ignored = vars(wrapper).get("parameters_to_ignore", ())  # of DistributedDataParallel
    inner = vars(wrapper).get("_modules", {}).values()
    return [parameter for each in inner for name, parameter in each.named_parameters() if name not in ignored]
