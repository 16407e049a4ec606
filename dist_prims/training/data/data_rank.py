"""Which rank of how many reads the data: as told, or as the group says."""

from __future__ import annotations

import torch.distributed as dist

from ...collectives.call import group_of

__all__ = ["place_of"]


def place_of(what: str, group: dist.ProcessGroup | None, rank: int | None, size: int | None) -> tuple[int, int]:
    """Rank and size; ValueError where half is told, or what is told cannot be."""
    if rank is None and size is None:
        members = group_of(group, what)
        return members.rank(), members.size()
    if rank is None or size is None or group is not None:
        raise ValueError(f"{what}: rank={rank}, size={size}, group={group}: give rank and size, or a group, or none")
    if not 0 <= rank < size:
        raise ValueError(f"{what}: rank={rank} of size={size}: ranks are numbered from 0 to size - 1")
    return rank, size
