"""Values that ranks of a group publish in its store while the group is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CommTimeoutError

__all__: list[str] = []


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
