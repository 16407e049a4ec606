"""The averager of a parameter: at most one, since a second one would divide the gradient again.

A parameter keeps its averager alive, by an attribute: so an averager lives as long as one of its parameters, even if
the program keeps no reference. The hooks hold it weakly, for torch does not free what is in a cycle with a hook.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from .averager import GradientAverager

__all__: list[str] = []

_ATTRIBUTE = "_dist_prims_averager"


class _Keeper:
    """A reference to the averager; in a copy or a file of the parameter it becomes an empty dict."""

    def __init__(self, averager: GradientAverager) -> None:
        self.averager = averager

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return OrderedDict, ()  # torch.load allows it


def averager_of(parameter: torch.Tensor) -> GradientAverager | None:
    """The averager that a parameter has."""
    keeper = vars(parameter).get(_ATTRIBUTE)
    return keeper.averager if isinstance(keeper, _Keeper) else None


def assign(parameters: Iterable[torch.Tensor], averager: GradientAverager) -> None:
    """Make ``averager`` the averager of these parameters."""
    keeper = _Keeper(averager)
    for parameter in parameters:
        vars(parameter)[_ATTRIBUTE] = keeper


def release(parameters: Iterable[torch.Tensor], averager: GradientAverager) -> None:
    """Take this averager from the parameters that have it."""
    for parameter in parameters:
        if averager_of(parameter) is averager:
            del vars(parameter)[_ATTRIBUTE]


def predecessors(model: torch.nn.Module, group: dist.ProcessGroup) -> list[GradientAverager]:
    """The averagers whose place a new one of ``model`` takes: the averager of the same parameters and ranks, and any
    whose group has ended. ValueError where another averager has a parameter of the model."""
    shared: dict[GradientAverager, list[str]] = {}
    for name, parameter in model.named_parameters():
        former = averager_of(parameter)
        if former is not None:
            shared.setdefault(former, []).append(name)
    parameters = {id(parameter) for parameter in model.parameters()}
    for former, names in shared.items():
        if not former.has_ended() and not former.is_like(parameters, group):
            raise ValueError(
                f"rank {group.rank()}: GradientAverager: another averager, of other parameters or ranks, has "
                f"{listed(names)} of this model already; a second one would divide their gradients again. Call "
                "remove() of the other averager first, or make one averager of a module that holds all of them"
            )
    return [*shared]


def averager_problem(operation: str, model: torch.nn.Module, rank: int) -> ValueError | None:
    """The error of another object that averages gradients, if a parameter of ``model`` has an averager."""
    names = [name for name, parameter in model.named_parameters() if averager_of(parameter)]
    if not names:
        return None
    return ValueError(
        f"rank {rank}: {operation}: a GradientAverager averages the gradients of {listed(names)} of this model "
        f"already; {operation} would divide them again. Call remove() of the averager first"
    )


def listed(names: list[str]) -> str:
    """Names of parameters as an error shows them.

    >>> listed(["a", "b", "c", "d"])
    "parameters 'a', 'b', 'c' and 1 more"
    """
    first = ", ".join(map(repr, names[:3]))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"parameter{'s' if len(names) > 1 else ''} {first}{more}"
