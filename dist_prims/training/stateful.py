"""Objects that have a state: modules, optimizers, schedulers, samplers, tensors, generators of random numbers."""

from __future__ import annotations

from typing import Any

import torch

__all__: list[str] = []


def state_of(target: Any) -> Any:
    """The current state, not copied."""
    if isinstance(target, torch.Generator):
        return target.get_state()
    if isinstance(target, torch.Tensor):
        return target.detach()
    return target if isinstance(target, dict) else target.state_dict()


def load(name: str, target: Any, state: Any) -> None:
    """Load a state; a tensor is filled in place, on its device.

    >>> load("x", torch.zeros(3), torch.ones(2))
    Traceback (most recent call last):
    ValueError: 'x' is (2,) of torch.float32 in the saved state and (3,) of torch.float32 here; make it as it was saved
    """
    if isinstance(target, torch.Generator):
        target.set_state(state)
    elif not isinstance(target, torch.Tensor):
        target.load_state_dict(state)
    else:
        check_alike(name, state, target)
        with torch.no_grad():
            target.copy_(state)


def check_alike(name: str, saved: torch.Tensor, here: torch.Tensor) -> None:
    """Raise ValueError if a saved tensor cannot be loaded into a tensor."""
    kinds = [f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in (saved, here)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"{name!r} is {kinds[0]} in the saved state and {kinds[1]} here; make it as it was saved")
