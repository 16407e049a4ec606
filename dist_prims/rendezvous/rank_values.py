"""Values that ranks of a group publish in its store while the group is made."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from ..errors import CommTimeoutError
from .deadline import until

__all__: list[str] = []

SECONDS_FOR_READERS = 10.0  # enough, because all ranks are connected to the store


def values_of_ranks(store: Any, rank: int, name: str, size: int) -> list[str]:
    """Return what each rank has set under ``name/rank``; CommTimeoutError names the ranks that have set nothing.

    >>> import torch.distributed as dist
    >>> store = dist.HashStore()
    >>> store.set("name/0", "a")
    >>> values_of_ranks(store, 0, "name", 1)
    ['a']
    """
    return values_at(store, rank, {each: f"{name}/{each}" for each in range(size)})


def values_at(store: Any, rank: int, keys: Mapping[int, str]) -> list[str]:
    """Return what each of these ranks has set under its key; CommTimeoutError names the ranks that have set nothing.

    >>> import torch.distributed as dist
    >>> store = dist.HashStore()
    >>> store.set("name", "a")
    >>> values_at(store, 1, {0: "name"})
    ['a']
    """
    try:
        return [value.decode() for value in store.multi_get([*keys.values()])]
    except RuntimeError as error:  # of a FileStore, and its subclass DistStoreError of others
        missing = [str(each) for each, key in keys.items() if not store.check([key])]
        if not missing:
            raise
        raise CommTimeoutError(
            f"rank {rank}: timeout while the group was made: no sign of rank {', '.join(missing)}; see whether it is "
            "stopped, busy, or waits elsewhere, and whether its host is up"
        ) from error


def from_rank_0(store: Any, rank: int, size: int, key: str, make: Callable[[], str]) -> str:
    """Return on every rank what ``make`` returns on rank 0; if ``make`` raises, the other ranks raise RuntimeError.

    CommTimeoutError names rank 0 if it sets nothing before the store's timeout.
    """
    if rank == 0:
        try:
            value = make()
        except Exception as error:
            store.set(key, f"!{type(error).__name__}: {error}")
            wait_for_readers(store, rank, key, size)
            raise
        store.set(key, f"={value}")
        return value
    [answer] = values_at(store, rank, {0: key})
    if answer.startswith("!"):
        wait_for_readers(store, rank, key, size)
        raise RuntimeError(f"dist_prims: rank {rank}: the group is not created, because rank 0 failed: {answer[1:]}")
    return answer[1:]


def wait_for_readers(store: Any, rank: int, key: str, size: int) -> None:
    """Note that this rank has read an error. Rank 0 waits until all have read it: its store may end."""
    with contextlib.suppress(TimeoutError, dist.DistError):  # the error matters more
        if rank:
            store.add(f"{key}/read", 1)
        else:
            deadline = time.monotonic() + SECONDS_FOR_READERS
            until(lambda: store.add(f"{key}/read", 0) == size - 1, deadline, "the readers")
