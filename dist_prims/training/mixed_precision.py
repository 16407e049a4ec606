"""Mixed precision on several ranks: loss scaling whose verdict is one for all.

float16 ends at 65504 and has nothing below 6e-8, so the loss is scaled up, gradients scaled down, and a step in which
one of them has overflowed is skipped. ``torch.amp.GradScaler`` decides that by the gradients of its own rank. Where
they are averaged an infinity reaches all ranks anyway; but with sharded optimisers, pipelines, experts or split layers
each rank holds other parameters, and a rank that skips while others step has another scale and model for ever.

::

    rank 0   unscale  0 found ─┐                 ┌─ 1: skip, halve the scale
    rank 1   unscale  1 found ─┼─ all_reduce max ┼─ 1: skip, halve the scale        four bytes an optimiser
    rank 2   unscale  0 found ─┘                 └─ 1: skip, halve the scale

Gradients that travel in 16 bits and are added in 32: ``GradientAverager(compress="bf16")``, see :mod:`.compression`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..collectives.call import group_of
from .compression.same import check_same

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for ranks that hold different gradients: all of them skip a step, or none.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer, scaler = torch.optim.SGD([weight], lr=1.0), GradScaler("cpu", init_scale=8.0)
    >>> scaler.scale(weight.sum() * float("inf")).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> weight.item(), scaler.get_scale()
    (1.0, 4.0)

    ``options`` are torch's, the same on every rank, which is checked at the first step. Every rank makes the same calls
    of :meth:`unscale_`, :meth:`step` and :meth:`update` in the same order, also one that has no gradients or no loss:
    its optimisers are asked with the others'. ``state_dict()`` is the same on all ranks.
    """

    def __init__(self, device: str | None = None, *, group: dist.ProcessGroup | None = None, **options: Any) -> None:
        super().__init__(device or ("cuda" if torch.cuda.is_available() else "cpu"), **options)
        self._group = group_of(group, "GradScaler")
        self._compared = False

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale and agree on what was found; between ``backward()`` and clipping."""
        if not self.is_enabled():
            return
        device = optimizer.param_groups[0]["params"][0].device
        if self._scale is None:  # this rank has scaled no loss: those of a pipeline's first stages have none
            self._lazy_init_scale_growth_tracker(device)
        self._compare(device)
        super().unscale_(optimizer)
        found = self._found_inf_per_device(optimizer)
        found.setdefault(device, torch.zeros((), device=device))  # without gradients nothing was looked at
        verdict = torch.stack([each.to(device) for each in found.values()]).amax(0)
        dist.all_reduce(verdict, dist.ReduceOp.MAX, self._group)
        for each in found.values():
            each.copy_(verdict)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """``optimizer.step()`` on all ranks, or on none if a gradient of any rank is not finite."""
        if self.is_enabled() and self._per_optimizer_states[id(optimizer)]["stage"] is _READY:
            self.unscale_(optimizer)  # fused optimisers would look for themselves, and ask nobody
        return super().step(optimizer, *args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` has returned; the next step checks that all ranks have loaded the same."""
        super().load_state_dict(state_dict)
        self._compared = False

    def _compare(self, device: torch.device) -> None:
        if not self._compared:
            state = ", ".join(f"{name}={value:g}" for name, value in self.state_dict().items())
            remedy = "Every rank must make its GradScaler with the same options, or load the same state"
            check_same(f"GradScaler({state})", remedy, self._group, device)
            self._compared = True


_READY = torch.amp.grad_scaler.OptState.READY
