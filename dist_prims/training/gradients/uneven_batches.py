"""Ranks with uneven numbers of batches: a rank that is done takes part with zeros until all are done.

Before each averaged backward one small all-reduce shows whether any rank still has a batch. So the ranks that are done
know whether there is another step to take part in, and which rank has made the last one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__: list[str] = []


class Joining:
    """A part of training in which ranks may end at different steps.

    >>> joining = Joining(dist.group.WORLD, torch.device("cpu"), by_size=False)
    >>> joining.ask(present=True).goes_on(), joining.factor
    (True, 1.0)
    >>> joining.ask(present=False).goes_on(), joining.last
    (False, 0)
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, by_size: bool) -> None:
        self._group, self._device, self._by_size = group, device, by_size
        self._table = torch.empty(0)
        self._work: dist.Work | None = None
        self.factor = 1.0  # of what was divided by the number of all ranks
        self.last: int | None = None  # a rank that has made the last step

    def ask(self, present: bool) -> Joining:
        """Begin the exchange whether any rank goes on; all ranks call it. Backward does not wait for it: another rank
        may be waiting for this one in a collective of a layer."""
        self._table = torch.zeros(self._group.size(), dtype=torch.int32, device=self._device)
        self._table[self._group.rank()] = int(present)
        self._work = dist.all_reduce(self._table, group=self._group, async_op=True)
        return self

    def goes_on(self) -> bool:
        """Wait for the exchange: whether any rank goes on."""
        if self._work is not None:
            self._work.wait()
        there = [rank for rank, going_on in enumerate(self._table.tolist()) if going_on]
        if there:
            self.last = there[0]
            self.factor = 1.0 if self._by_size else self._group.size() / len(there)
        return bool(there)
