"""Assignment of parameters to the modules that gather them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__: list[str] = []


def children(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules of a model that are called: not lists of modules, but their members.

    >>> [*children(torch.nn.ModuleDict({"some": torch.nn.ModuleList([torch.nn.Tanh()]), "one": torch.nn.ReLU()}))]
    [Tanh(), ReLU()]
    """
    for child in model.children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from children(child)
        elif not isinstance(child, torch.nn.ParameterList | torch.nn.ParameterDict):
            yield child


def units_of(
    model: torch.nn.Module, modules: list[torch.nn.Module]
) -> list[tuple[torch.nn.Module, list[torch.nn.Parameter]]]:
    """The modules that gather parameters, each with its parameters.

    The model gathers the parameters that are in none of the modules or in several.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1, bias=False))
    >>> [(type(module).__name__, len(parameters)) for module, parameters in units_of(model, [model[0]])]
    [('Sequential', 1), ('Linear', 2)]
    """
    modules = list(dict.fromkeys(each for each in modules if each is not model))
    inside = {id(each) for each in model.modules()}
    for module in modules:
        if id(module) not in inside:
            raise ValueError(f"ShardedParameters: unit {type(module).__name__} is not a part of the model")
        if nested := next((each for each in module.modules() if each in modules and each is not module), None):
            raise ValueError(
                f"ShardedParameters: unit {type(module).__name__} contains unit {type(nested).__name__}; give one"
            )
    users: dict[torch.nn.Parameter, list[torch.nn.Module]] = {each: [] for each in model.parameters()}
    for module in modules:
        for parameter in module.parameters():
            users[parameter].append(module)
    found = [(module, [p for p, by in users.items() if by == [module]]) for module in modules]
    rest = [parameter for parameter, by in users.items() if len(by) != 1]
    if not users:
        raise ValueError("ShardedParameters: the model has no parameters")
    return [(module, parameters) for module, parameters in [(model, rest), *found] if parameters]


def by_kind(parameters: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters in groups that can be one flat tensor: by dtype, device and ``requires_grad``.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1).half())
    >>> [[tuple(each.shape) for each in kind] for kind in by_kind([*model.parameters()])]
    [[(1, 2), (1,)], [(1, 1), (1,)]]
    """
    kinds: dict[Any, list[torch.nn.Parameter]] = {}
    for each in parameters:
        kinds.setdefault((each.dtype, each.device, each.requires_grad), []).append(each)
    return list(kinds.values())
