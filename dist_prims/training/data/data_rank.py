"""Rank and size of a reader of data: the given ones, or the group's."""

from __future__ import annotations

import torch.distributed as dist

from ...collectives.call import group_of

__all__: list[str] = []


def place_of(what: str, group: dist.ProcessGroup | None, rank: int | None, size: int | None) -> tuple[int, int]:
    """Rank and size; ValueError, which names the caller ``what``, if only one is given or the rank is out of range."""
    if rank is None and size is None:
        members = group_of(group, what)
        return members.rank(), members.size()
    if rank is None or size is None or group is not None:
        raise ValueError(f"{what}: rank={rank}, size={size}, group={group}: give rank and size, a group, or none")
    if not 0 <= rank < size:
        raise ValueError(f"{what}: rank={rank} of size={size}: ranks are numbered from 0 to size - 1")
    return rank, size
