"""Loss scaling with one verdict: all ranks skip a step, or none.

A sum carries one rank's inf to all. But a compressor may lose it, a clamp may hide it, and an optimiser may hold
parameters that no rank averages; a rank that then steps while others skip has another model from then on. So the ranks
agree on what ``GradScaler`` has found, by one all-reduce of one number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ...torch_compat import found_overflow

__all__: list[str] = []


def unscale(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup | None,
    announce: Callable[[], object] = lambda: None,
) -> None:
    """``scaler.unscale_(optimizer)``; an inf on one rank is then found on all. ``announce()`` is called before
    anything is sent.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu")
    >>> scaler.scale(weight.sum() * float("inf")).backward()
    >>> unscale(scaler, optimizer, None)
    >>> scaler.step(optimizer), weight.item()
    (None, 1.0)
    """
    if not scaler.is_enabled():
        return
    scaler.unscale_(optimizer)
    found = found_overflow(scaler, optimizer)
    device = optimizer.param_groups[0]["params"][0].device
    verdict = torch.zeros((), device=device)
    for each in found.values():
        verdict = torch.maximum(verdict, each.to(device))
    announce()
    agree_on_overflow(verdict, group)
    found.setdefault(device, torch.zeros((), device=device))  # a rank without gradients has checked none
    for each in found.values():
        each.copy_(verdict)


def agree_on_overflow(verdict: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Make ``verdict`` 1 on all ranks if it is 1 on one of them."""
    dist.all_reduce(verdict, dist.ReduceOp.MAX, group)
