"""Ranks with uneven numbers of batches: who is done goes on taking part, with zeros, until all are done.

Before each averaged backward the ranks that still have one say so, and those that are done listen: so these know
whether there is another step to take part in, and who has made the last one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["Joining"]


class Joining:
    """One stretch of training within which ranks may end at different steps.

    >>> joining = Joining(dist.group.WORLD, torch.device("cpu"), by_size=False)
    >>> joining.roll(present=True), joining.share
    (True, 1.0)
    >>> joining.roll(present=False), joining.last
    (False, 0)
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, by_size: bool) -> None:
        self._group, self._device, self._by_size = group, device, by_size
        self.share = 1 / group.size()  # of each rank in a mean
        self.last: int | None = None  # a rank that has made the last step

    def roll(self, present: bool) -> bool:
        """Whether any rank goes on; all ranks must call it."""
        table = torch.zeros(self._group.size(), dtype=torch.int32, device=self._device)
        table[self._group.rank()] = int(present)
        dist.all_reduce(table, group=self._group)
        there = [rank for rank, going_on in enumerate(table.tolist()) if going_on]
        if there:
            self.last = there[0]
            self.share = 1 / (self._group.size() if self._by_size else len(there))
        return bool(there)
