"""Comparison of a saved state with its target, as far as possible without loading it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from ...torch_compat import has_load_hooks
from .plain_state import Target, leaves, state_of

__all__: list[str] = []


def refuse_other(name: str, target: Target, state: Any) -> None:
    """Raise ValueError if ``state`` cannot be the state of ``target``.

    >>> refuse_other("x", torch.zeros(3), torch.ones(2))
    Traceback (most recent call last):
    ValueError: 'x' is (2,) of float32 at [] in the checkpoint and (3,) of float32 here; make it as it was saved
    """
    there = dict(leaves(name, state_of(target)))
    for path, tensor in leaves(name, state):
        here = there.get(path, tensor)
        if (tensor.shape, tensor.dtype) != (here.shape, here.dtype):
            raise _other(name, f"{_kind(tensor)} at {list(path)}", _kind(here))
    if isinstance(target, nn.Module):
        _refuse_keys(name, target, state)
    if isinstance(target, torch.optim.Optimizer):
        _refuse_parameters(name, target, state)


def _refuse_keys(name: str, module: nn.Module, state: dict[str, Any]) -> None:
    if type(module).load_state_dict is not nn.Module.load_state_dict or any(
        has_load_hooks(each) for each in module.modules()
    ):
        return  # the module may be able to load other keys
    here = module.state_dict()
    for verb, these, those in (("has", state, here), ("lacks", here, state)):
        if more := sorted(set(these) - set(those)):
            raise ValueError(
                f"{name!r} in the checkpoint {verb} {', '.join(more[:5])}, unlike here; make it as it was saved"
            )


def _refuse_parameters(name: str, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    groups = [group["params"] for group in state["param_groups"]]
    saved, here = list(map(len, groups)), [len(group["params"]) for group in optimizer.param_groups]
    if saved != here:
        raise _other(name, f"of groups of {saved} parameters", f"{here}")
    if not type(optimizer).__module__.startswith("torch.optim.") or isinstance(optimizer, torch.optim.LBFGS):
        return  # its tensors need not be shaped like their parameters
    parameters = itertools.chain(*(group["params"] for group in optimizer.param_groups))
    for number, parameter in zip(itertools.chain(*groups), parameters, strict=True):
        for key, value in state["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() == parameter.dim():
                pairs = zip(value.shape, parameter.shape, strict=True)
                if any(count not in (1, wanted) for count, wanted in pairs):  # 1: Adafactor's rows and columns
                    raise _other(name, f"{tuple(value.shape)} at {number}, {key!r}", f"{tuple(parameter.shape)}")


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype)[6:]}"


def _other(name: str, saved: str, here: str) -> ValueError:
    return ValueError(f"{name!r} is {saved} in the checkpoint and {here} here; make it as it was saved")
