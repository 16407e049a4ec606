"""``shrink()``: the survivors of a group form a smaller one, without a restart."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from ..backend.create import find_made_group, made_group
from ..backend_name import NAME
from ..collectives.call import group_of
from ..errors import CommError
from ..torch_compat import backend_name, backend_of, default_group, known_groups, replace_group, timeout_of
from .repair_attempt import RepairAttempt
from .survivors import OtherMembers, prevent_group, survive

__all__: list[str] = []

_CPU = torch.device("cpu")
_SEPARATOR = " after "  # in the names of repaired groups, before the name of the old group


def shrink(group: dist.ProcessGroup | None = None, *, timeout: float | None = None) -> dist.ProcessGroup:
    """Form a group of the ranks that are left, after a failure, and return it. All of them must call this.

    >>> import os, signal, dist_prims
    >>> def sum_of_survivors():
    ...     if dist.get_rank() == 1:
    ...         os.kill(os.getpid(), signal.SIGKILL)
    ...     total = torch.ones(1)
    ...     try:
    ...         dist.all_reduce(total)
    ...     except dist_prims.CommError:
    ...         dist_prims.shrink()
    ...         total = torch.ones(1)
    ...         dist.all_reduce(total)
    ...     return dist.get_rank(), total.item()
    >>> dist_prims.spawn(sum_of_survivors, 3, backend="dist_prims", timeout=60, min_ranks=2)
    [(0, 2.0), None, (1, 2.0)]

    The ranks keep their order and get new numbers. If ``group`` is the default group, the new group takes its place,
    and all other groups are destroyed. Otherwise only ``group`` is replaced. The old group ends: its unfinished calls
    raise :class:`PeerLeftError`.

    How long the ranks wait for another one:

    - until its process has ended or ``timeout`` seconds have passed, by default the timeout of the group;
    - 0.3 s if the error of the group names it as late;
    - a second if it is on the host of such a rank, and the host does not answer.

    If the link between two hosts does not deliver, one of the two hosts is left out. A rank that is left out raises
    :class:`LeftOutError`. If further ranks die meanwhile, the others agree again.

    Between hosts a majority of up to five ranks must be left, at first the first rank of each host; ranks on the
    smaller side of a network that is cut in two raise :class:`CommError`.
    """
    old = group_of(group, "shrink")
    limit = timeout_of(old, _CPU).total_seconds() if timeout is None else timeout
    backend = repairable_backend(old, "shrink")
    other_groups = [other for other in known_groups() if old is default_group() and other is not old]
    others = [backend_of(other, _CPU) for other in other_groups if find_made_group(other)]
    attempt, members = _repair(backend, limit, others=others)
    return replace_group(old, attempt.backend, attempt.store, members, attempt.backend.options.group_name)


def shrink_backend(backend: Any, excluded: Collection[int]) -> Any:
    """Return the backend of a group without these ranks; called by C++ for ``torch.distributed.shrink_group``."""
    try:
        attempt, _ = _repair(backend, backend.options._timeout.total_seconds(), frozenset(excluded))
    except OtherMembers as error:
        expected = [rank for rank in range(backend.size()) if rank not in excluded]
        raise CommError(
            f"rank {backend.rank()}: shrink_group: of the ranks {expected} that are not excluded only "
            f"{list(error.members)} are left; call dist_prims.shrink(), which needs no list"
        ) from None
    return attempt.backend


def _repair(
    backend: Any, limit: float, excluded: frozenset[int] = frozenset(), others: Collection[Any] = ()
) -> tuple[RepairAttempt, tuple[int, ...]]:
    """Make the group of the survivors that are not excluded. Return the attempt, which has the group, and the members.

    ``limit``: the longest time in seconds in which nothing changes. ``others``: the backends of further groups that
    end with the old group.
    """
    # 1. End the old group and the others: this rank makes no further calls in them, and the ranks of its host learn
    # that. A rank that waits in one of them for this rank raises, and can call shrink(), too.
    name = backend.options.group_name
    ending = [] if excluded else [backend, *others]
    attempt = RepairAttempt(backend, next_name(name), limit, "shrink", ending=ending)
    for ending_backend in (backend, *others):
        ending_backend.abort()
    # 2. If an earlier grow() has raised here before its outcome was known, the other ranks may have its group, and must
    # not see a second one. Make that group fail, or raise if the other ranks have it.
    if undecided := made_group(name).undecided_grow:
        RepairAttempt(backend, next_name(name), limit, undecided).run(prevent_group(0))
        made_group(name).undecided_grow = ""
    # 3. Agree and make the group.
    return attempt, attempt.run(survive(backend.rank(), range(backend.size()), excluded, made_group(name).hosts))


def next_name(name: str) -> str:
    """Return the name of the group that takes the place of the group with this name. All ranks return the same.

    The new name contains the random name of the attempt that has made the old group. A counter would give the name of
    another group, because torch counts its groups from the beginning after a new default group.
    """
    return f"{name.partition(_SEPARATOR)[0]}{_SEPARATOR}{made_group(name).attempt[:8]}"


def repairable_backend(group: dist.ProcessGroup, operation: str) -> Any:
    """Return the backend of a group for a repair; TypeError if the group has other backends as well."""
    if {name.rpartition(":")[2] for name in backend_name(group).split(",")} != {NAME}:  # a name may begin with a device
        raise TypeError(
            f"{operation}: the group has the backend {dist.get_backend_config(group)}; only groups of the backend "
            f"{NAME} alone can be repaired"
        )
    backend = backend_of(group, _CPU)
    if getattr(backend, "awaits_members", False):  # no adapter before torch 2.15 has it
        raise RuntimeError(f"{operation}: the group has no members yet; call reconfigure first")
    return backend
