"""A process group for torchft: ``Manager(pg=ProcessGroupPrims(timeout=...), ...)``."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torchft.process_group import ProcessGroupWrapper

from .unlisted_group import make_unlisted_group

__all__: list[str] = []


class ProcessGroupPrims(ProcessGroupWrapper):
    """The group of the current quorum. ``configure()`` of torchft makes a new one for each quorum."""

    _timeout: timedelta  # torchft sets both
    _quorum_id: int | None

    def getBackendName(self) -> str:
        return "torchft-dist_prims"

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        return make_unlisted_group(store, rank, world_size, self._timeout, f"quorum {self._quorum_id}")
