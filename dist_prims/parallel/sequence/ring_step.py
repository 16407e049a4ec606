"""One step of the ring: send a tensor to the next rank and receive one from the rank before."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...torch_compat import exposed_timeout

__all__: list[str] = []


class Hop:
    """A transfer that the constructor begins; the ranks make their hops in the same order. ``into``: the receive
    buffer.

    >>> Hop(torch.ones(2), torch.distributed.group.WORLD).arrived()
    tensor([1., 1.])
    """

    def __init__(self, data: torch.Tensor, group: dist.ProcessGroup, into: torch.Tensor | None = None) -> None:
        self._group = group
        rank, size = group.rank(), group.size()
        self._data = data  # keeps the memory until it is sent
        into = torch.empty_like(data) if into is None else into
        self._coming = into if size > 1 else data
        pair = [(dist.isend, data, (rank + 1) % size), (dist.irecv, self._coming, (rank - 1) % size)]
        calls = [dist.P2POp(kind, each, group=group, group_peer=peer) for kind, each, peer in pair if peer != rank]
        self._works = dist.batch_isend_irecv(calls) if calls and data.numel() else []

    def arrived(self) -> torch.Tensor:
        """Wait for both transfers; the tensor from the rank before."""
        for work in self._works:
            finish(work, self._group, self._data.device)
        return self._coming


def finish(work: Any, group: dist.ProcessGroup, device: torch.device) -> None:
    """Wait for work of a group until its timeout, which gloo takes as an argument and "dist_prims" applies itself.

    >>> tensor = torch.ones(1)
    >>> finish(dist.all_reduce(tensor, async_op=True), dist.group.WORLD, tensor.device)
    """
    if device.type == "cuda":
        work.wait()  # the stream waits, not this thread; NCCL's watchdog has the timeout
        return
    limit = exposed_timeout(group, device)
    if limit is None:
        work.wait()
    else:
        work.wait(limit)
