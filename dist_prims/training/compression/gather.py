"""All ranks' bytes, as rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...torch_compat import all_gather_single

__all__ = ["gather_rows"]


def gather_rows(mine: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, Any]:
    """Begin to gather a flat tensor of every rank; row r is that of rank r, once the work has been waited for.

    >>> rows, work = gather_rows(torch.tensor([1, 2], dtype=torch.uint8), None)
    >>> work.wait(), rows.tolist()
    (True, [[1, 2]])
    """
    rows = mine.new_empty(dist.get_world_size(group), mine.numel())
    return rows, all_gather_single(rows.view(-1), mine, group, async_op=True)
