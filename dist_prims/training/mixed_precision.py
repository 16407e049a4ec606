"""Loss scaling on several ranks: all of them skip a step, or none.

float16 ends at 65504 and has nothing below 6e-8, so ``torch.amp.GradScaler`` scales the loss up and gradients down, and
skips a step if one of them has overflowed. It looks at the gradients of its own rank. Averaged gradients carry an
infinity to all ranks; but ranks of a pipeline, of a sharded optimizer or with experts have different parameters. A rank
that skips alone has another scale and another model from then on.

::

    rank 0   unscale_  0 found ─┐                 ┌─ 1: skip, halve the scale
    rank 1   unscale_  1 found ─┼─ all_reduce max ┼─ 1: skip, halve the scale       12 bytes an optimizer
    rank 2   unscale_  0 found ─┘                 └─ 1: skip, halve the scale
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..errors import MismatchError
from ..torch_compat import found_overflow, message_device

__all__ = ["unscale"]

_OVERFLOW, _FAILED = 1.0, 2.0


def unscale(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
) -> None:
    """``scaler.unscale_(optimizer)`` on all ranks; an overflow on one of them makes ``scaler.step`` skip on all.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu")
    >>> scaler.scale(weight.sum() * float("inf")).backward()
    >>> unscale(scaler, optimizer)
    >>> scaler.step(optimizer), weight.item()
    (None, 1.0)

    Every rank calls it before ``scaler.step(optimizer)``, also a rank that has no loss, gradients or parameters. If the
    ranks have different scales, all raise MismatchError. If one rank cannot unscale, all raise. A scaler that is not
    enabled sends nothing: it must be so on all ranks.
    """
    if not scaler.is_enabled():
        return
    parameters = [parameter for options in optimizer.param_groups for parameter in options["params"]]
    device = parameters[0].device if parameters else message_device(group)
    scaler.scale(torch.zeros((), device=device))  # makes the tensor of the scale, if this rank has scaled no loss
    failure: Exception | None = None
    try:
        scaler.unscale_(optimizer)
    except (RuntimeError, ValueError) as error:  # raised after the agreement, so that the other ranks do not wait
        failure = error
    overflows = found_overflow(scaler, optimizer)  # by device
    status = _FAILED if failure else max([0.0, *(overflow.item() for overflow in overflows.values())])
    overflows.setdefault(device, torch.zeros((), device=device))  # a rank without gradients has checked nothing
    for overflow in overflows.values():
        overflow.fill_(_OVERFLOW)  # a program that steps although this function raises skips the step
    try:
        status = agree_on_overflow(status, group, scaler.get_scale())
    finally:
        if failure:
            raise failure
    for overflow in overflows.values():
        overflow.fill_(status)


def agree_on_overflow(status: float, group: dist.ProcessGroup | None, scale: float | None = None) -> float:
    """The greatest status of all ranks: 0, or 1 for an overflow. A rank that is done in ``join()`` has no ``scale``."""
    scales = [-torch.inf, -torch.inf] if scale is None else [scale, -scale]
    greatest = torch.tensor([status, *scales], dtype=torch.float64, device=message_device(group))
    dist.all_reduce(greatest, dist.ReduceOp.MAX, group)
    status, most, least = greatest.tolist()  # ``least`` is the least scale with its sign changed
    rank = f"rank {dist.get_rank(group)}: unscale"
    if status == _FAILED:
        raise RuntimeError(f"{rank}: a rank could not unscale its gradients, so no rank may step; see its error")
    if most != -least:
        raise MismatchError(f"{rank}: scale={scale} here, {-least} to {most} on all ranks; load the same state")
    return status
