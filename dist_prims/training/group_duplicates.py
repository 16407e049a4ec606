"""Duplicates of groups, as ``MPI_Comm_dup`` makes them: the collectives of a library stay apart from the program's.

A group pairs collectives by their order. A collective that a hook launches may come after another collective on one
rank and before it on another, depending on the batch. On a group of its own it is paired with nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ..backend import options_of

__all__: list[str] = []

c10d: Any = dist.distributed_c10d


def duplicate(group: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """A new group with the ranks, the backend, its options and the timeout of ``group``; each of its ranks calls this.

    ``name``: the same on all of these ranks, and new. ``new_group`` would have every rank of the world call it, or name
    the group by how many groups this process has, which may differ by rank. A group of one rank is returned itself, and
    so is one that ``torch.distributed`` did not make.

    >>> duplicate(dist.group.WORLD, "a name") is dist.group.WORLD  # one rank
    True
    """
    if group.size() == 1 or not is_known(group):
        return group
    ranks = dist.get_process_group_ranks(group)
    backend = dist.get_backend(group)
    world = c10d._get_default_group()
    with _not_split_from(world):
        made, _ = c10d._new_process_group_helper(
            len(ranks),
            group.rank(),
            ranks,
            c10d.Backend(backend),
            c10d._world.pg_map[world][1],
            name,
            backend_options=options_of(group),
            timeout=_timeout(group),
            group_desc=name,
        )
    c10d._world.pg_group_ranks[made] = {rank: position for position, rank in enumerate(ranks)}
    found: dist.ProcessGroup = made
    return found


def is_known(group: dist.ProcessGroup) -> bool:
    """Whether ``torch.distributed`` has made this group, and not ended it."""
    return group in c10d._world.pg_map


def ranks_of(group: dist.ProcessGroup) -> list[int] | None:
    """Its ranks, by their numbers in the world; None if ``torch.distributed`` does not know the group."""
    return dist.get_process_group_ranks(group) if is_known(group) else None


def end_group(group: dist.ProcessGroup, process: int) -> None:
    """Destroy a group of ``process``, unless that has happened; in a process forked from it, do nothing."""
    if process == os.getpid() and is_known(group):
        dist.destroy_process_group(group)


def _timeout(group: dist.ProcessGroup) -> Any:
    for device in group._device_types:
        timeout = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if timeout is not None:
            return timeout
    return dist.default_pg_timeout


@contextmanager
def _not_split_from(world: Any) -> Iterator[None]:
    """A communicator of NCCL that is split from the world's needs a call on every rank of the world; where the world is
    bound to a device, torch splits. Within, it makes a new one."""
    device = world.bound_device_id
    if device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device
