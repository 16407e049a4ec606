"""Mixed precision on several ranks: loss scaling with one overflow verdict for all ranks.

float16 ends at 65504 and has nothing below 6e-8, so the loss is scaled up, gradients scaled down, and a step in which
one of them has overflowed is skipped. ``torch.amp.GradScaler`` decides that by the gradients of its own rank. Where
they are averaged an infinity reaches all ranks anyway; but with sharded optimisers, pipelines, experts or split layers
each rank holds other parameters, and a rank that skips while others step has another scale and model from then on.

::

    rank 0   unscale  0 found ─┐                 ┌─ 1: skip, halve the scale
    rank 1   unscale  1 found ─┼─ all_reduce max ┼─ 1: skip, halve the scale       eight bytes an optimiser
    rank 2   unscale  0 found ─┘                 └─ 1: skip, halve the scale

Gradients that travel in 16 bits and are added in 32: ``GradientAverager(compress="bf16")``, see :mod:`.compression`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..agreement import check_same
from ..collectives.call import group_of

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

    The arguments are torch's and the same on every rank. The ranks compare them at the first step, and after a rank has
    loaded a state or set a scale; but not ``enabled``: a disabled scaler sends nothing, and if only some are enabled,
    these wait until the group's timeout. Every rank makes the same calls of :meth:`unscale_`, :meth:`step` and
    :meth:`update` in the same order, also one that has no gradients or no loss. ``state_dict()`` is the same on all
    ranks. A copied or unpickled scaler uses the default group.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(kind, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._group = group_of(group, "GradScaler")
        self._compared = False

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale and agree on what was found; between ``backward()`` and clipping.

        Where it fails on one rank, for its gradients are float16 or it was called twice, it raises on all.
        """
        if not self.is_enabled():
            return
        own = [each for group in optimizer.param_groups for each in group["params"]]
        device = own[0].device if own else torch.device(self._device)  # a sharded optimiser may have nothing here
        if self._scale is None:  # this rank has scaled no loss: those of a pipeline's first stages have none
            self._lazy_init_scale_growth_tracker(device)
        failure: Exception | None = None
        found: dict[Any, torch.Tensor] = {}  # by device
        try:
            super().unscale_(optimizer)
            found = self._found_inf_per_device(optimizer)
        except Exception as error:  # sent to the other ranks before it is raised
            failure = error
        found.setdefault(device, torch.zeros((), device=device))  # without gradients torch has checked nothing
        mine = torch.stack([each.to(device) for each in found.values()]).amax(0)
        for each in found.values():
            each.fill_(1.0)  # a program that steps although this raises skips the step
        verdict = self._agree(mine, failure)
        for each in found.values():
            each.copy_(verdict)

    def _agree(self, mine: torch.Tensor, failure: Exception | None) -> torch.Tensor:
        """The verdict of all ranks, if none has failed; where the state of one may be new, compare the states."""
        status = _FAILED if failure else _COMPARE if not self._compared else _NONE
        verdict = torch.stack([mine, torch.full_like(mine, status)])
        dist.all_reduce(verdict, dist.ReduceOp.MAX, self._group)
        if failure:
            raise failure
        status = verdict[1].item()
        if status == _FAILED:
            raise RuntimeError(
                f"GradScaler on rank {dist.get_rank(self._group)}: another rank could not unscale its gradients, so no "
                "rank may step; see its error"
            )
        if status == _COMPARE:
            self._compare(mine.device)
        return verdict[0]

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """``optimizer.step()`` on all ranks, or on none if a gradient of any rank is not finite."""
        if self.is_enabled() and self._per_optimizer_states[id(optimizer)]["stage"] is _READY:
            self.unscale_(optimizer)  # fused optimisers would check only their own gradients
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adjust the scale, or set it; the next step checks that all ranks have set the same."""
        super().update(new_scale)
        self._compared = self._compared and new_scale is None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` has returned; the next step checks that all ranks have loaded the same."""
        super().load_state_dict(state_dict)
        self._compared = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_group": None, "_compared": False}

    def _compare(self, device: torch.device) -> None:
        state = ", ".join(f"{name}={value!r}" for name, value in self.state_dict().items())
        remedy = "Every rank must make its GradScaler with the same options, or load the same state"
        self._compared = False  # until the states are known to be equal
        check_same(f"GradScaler({state})", remedy, self._group, device)
        self._compared = True


_READY = torch.amp.grad_scaler.OptState.READY
_NONE, _COMPARE, _FAILED = 0.0, 1.0, 2.0  # sent beside the verdict; the maximum over the ranks counts
