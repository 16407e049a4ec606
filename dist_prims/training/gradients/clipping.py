"""Clipping of gradients that are the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__: list[str] = []


@torch.no_grad()
def clip(gradients: Sequence[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale gradients in place so that their common norm is at most ``max_norm``; return the norm before."""
    values = [each if each.layout == torch.strided else each.coalesce().values() for each in gradients]
    total = torch.nn.utils.get_total_norm(values, norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for each in values:
        each.mul_(scale.to(each.device))
    return total
