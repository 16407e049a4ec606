"""What torch 2.13 has renamed or added in ``torch.distributed``, by its new name, and what it keeps private."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["all_gather_single", "group_store", "premul_factor", "reduce_scatter_single"]

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_store(group: dist.ProcessGroup) -> dist.Store | None:
    """The store that the ranks of a group share, if torch keeps one for it."""
    found = dist.distributed_c10d._world.pg_map.get(group)
    return found[1] if found else None


def premul_factor(op: Any) -> Any:
    """The factor of a PREMUL_SUM: a number or a tensor. Before torch 2.13 only its pickled form holds it."""
    return op.factor if hasattr(dist.ReduceOp, "factor") else op.__getstate__()[1]
