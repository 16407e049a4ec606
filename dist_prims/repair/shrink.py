"""``shrink()``: the survivors of a group form a smaller one, without a restart."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from ..backend.create import made_group
from ..backend_name import NAME
from ..collectives.call import group_of
from ..errors import CommError
from ..torch_compat import backend_name, backend_of, replace_group, timeout_of
from .repair_attempt import RepairAttempt
from .survivors import OtherMembers, prevent, survive

__all__: list[str] = []

_CPU = torch.device("cpu")
_AGREEMENT = "shrink"
_SEPARATOR = " after "  # in names of groups


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

    Of two hosts whose link does not deliver one is left out. A rank that has been left out raises
    :class:`LeftOutError`. If further ranks die meanwhile, the others agree again.

    Between hosts a majority of up to five ranks must be left, at first the first rank of each host; ranks on the
    smaller side of a network that is cut in two raise :class:`CommError`.
    """
    old = group_of(group, "shrink")
    limit = timeout_of(old, _CPU).total_seconds() if timeout is None else timeout
    attempt, members = _attempt(repairable_backend(old, "shrink"), limit)
    return replace_group(old, attempt.backend, attempt.store, members, attempt.backend.options.group_name)


def shrink_backend(backend: Any, excluded: Collection[int]) -> Any:
    """Return the backend of a group without these ranks; called by C++ for ``torch.distributed.shrink_group``."""
    try:
        attempt, _ = _attempt(backend, backend.options._timeout.total_seconds(), frozenset(excluded))
    except OtherMembers as found:
        expected = [rank for rank in range(backend.size()) if rank not in excluded]
        raise CommError(
            f"rank {backend.rank()}: shrink_group: of the ranks {expected} that are not excluded only "
            f"{list(found.members)} are left; call dist_prims.shrink(), which needs no list"
        ) from None
    return attempt.backend


def _attempt(
    backend: Any, limit: float, excluded: frozenset[int] = frozenset()
) -> tuple[RepairAttempt, tuple[int, ...]]:
    name = backend.options.group_name
    attempt = RepairAttempt(backend, next_name(name), limit, _AGREEMENT, ends_old_group=not excluded)
    backend.abort()  # this rank makes no further calls in the old group, and says so to the ranks of its host
    # An earlier grow() has raised here before its outcome was known. prevent() makes it fail, or raises if the other
    # ranks have that group, of which this rank is a member: it must not form another one.
    if undecided := made_group(name).undecided_grow:
        RepairAttempt(backend, next_name(name), limit, undecided).run(prevent(0))
        made_group(name).undecided_grow = ""
    return attempt, attempt.run(survive(backend.rank(), range(backend.size()), excluded, made_group(name).hosts))


def next_name(name: str) -> str:
    """Return the name of the group that takes the place of the one with this name; all ranks form the same.

    It contains the name of the attempt that has made the old group, which is random: torch counts the groups that it
    makes, and begins again with a new default group, so a counter would give the name of another group.
    """
    return f"{name.partition(_SEPARATOR)[0]}{_SEPARATOR}{made_group(name).attempt[:8]}"


def repairable_backend(group: dist.ProcessGroup, operation: str) -> Any:
    """Return the backend of a group; TypeError if the group has another one as well."""
    if backend_name(group) != NAME:
        raise TypeError(
            f"{operation}: the group has the backend {dist.get_backend_config(group)}; only groups of the backend "
            f"{NAME} alone can be repaired"
        )
    backend = backend_of(group, _CPU)
    if getattr(backend, "awaits_members", False):  # no adapter before torch 2.15 has it
        raise RuntimeError(f"{operation}: the group has no members yet; call reconfigure first")
    return backend
