"""Duplicates of groups, as ``MPI_Comm_dup`` makes them: the collectives of a library stay apart from the program's.

A group pairs collectives by their order. A collective that a hook launches may come after another collective on one
rank and before it on another, depending on the batch. On a group of its own it is paired with nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ..backend import options_of
from ..torch_compat import backend_name, device_types, exposed_timeout, knows_group, new_local_group

__all__: list[str] = []


def duplicate(group: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """A new group with the ranks, the backend, its options and the timeout of ``group``; each of its ranks calls this.

    ``name``: the same on all of these ranks, and new. A group of one rank is returned unchanged, and so is a group that
    ``torch.distributed`` did not make.
    """
    if group.size() == 1 or not knows_group(group):
        return group
    ranks = dist.get_process_group_ranks(group)
    backend = backend_name(group)
    return new_local_group(ranks, group.rank(), backend, name, options_of(group), _timeout(group))


def ranks_of(group: dist.ProcessGroup) -> list[int] | None:
    """The ranks of a group, by their numbers in the world; None if ``torch.distributed`` does not know the group."""
    return dist.get_process_group_ranks(group) if knows_group(group) else None


def end_groups(duplicates: Sequence[dist.ProcessGroup], group: dist.ProcessGroup, process: int) -> None:
    """Destroy duplicates of ``group`` that ``process`` has made, unless that has happened; in a process forked from it,
    do nothing."""
    for each in duplicates:
        if each is not group and process == os.getpid() and knows_group(each):
            dist.destroy_process_group(each)


def _timeout(group: dist.ProcessGroup) -> timedelta:
    found = [exposed_timeout(group, torch.device(kind)) for kind in device_types(group)]
    return next((timeout for timeout in found if timeout is not None), dist.default_pg_timeout)
