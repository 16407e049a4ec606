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
_FAILED = "!"  # the first character of a value that is the text of an error


def values_of_ranks(store: Any, rank: int, name: str, size: int) -> list[str]:
    """Return what each rank r has set under ``name/r``; CommTimeoutError names the ranks that have set nothing."""
    return values_at(store, rank, {other: f"{name}/{other}" for other in range(size)})


def values_at(store: Any, rank: int, keys: Mapping[int, str]) -> list[str]:
    """Return what other ranks have set, in the order of ``keys``, which has the key of each rank by the rank's number.

    The call waits for the timeout of the store at most; CommTimeoutError names the ranks that have set nothing.
    """
    try:
        return [value.decode() for value in store.multi_get([*keys.values()])]
    except RuntimeError as error:  # a FileStore raises RuntimeError, other stores its subclass DistStoreError
        missing = [str(other) for other, key in keys.items() if not store.check([key])]
        if not missing:
            raise
        raise timeout_while_made(rank, f"no sign of rank {', '.join(missing)}") from error


def timeout_while_made(rank: int, what: str) -> CommTimeoutError:
    """Return the error of this rank for a group that could not be made in time, because of ``what``."""
    return CommTimeoutError(
        f"rank {rank}: timeout while the group was made: {what}; see whether it is stopped, busy, or waits elsewhere, "
        "and whether its host is up"
    )


def make_and_publish(
    store: Any, rank: int, size: int, name: str, make_own: Callable[[], tuple[Any, str]], failure: str
) -> tuple[Any, list[str]]:
    """Make something on each rank, publish a text about it, and return this rank's thing and the texts of all ranks.

    Every rank of the group calls this. If ``make_own`` fails on a rank, all ranks raise RuntimeError with that rank.

    Args:
        store: the store of the group.
        rank: this rank.
        size: the number of ranks.
        name: rank r publishes its text under the key ``name/r``.
        make_own: returns what this rank has made, such as an endpoint, and the text, such as its address.
        failure: what the error says of a rank whose ``make_own`` has failed: "cannot listen".
    """
    own: Any = None
    try:
        own, text = make_own()
    except (OSError, ValueError, RuntimeError) as error:
        text = f"{_FAILED}{error}"
    store.set(f"{name}/{rank}", text)
    texts = values_of_ranks(store, rank, name, size)
    for other, text in enumerate(texts):
        if text.startswith(_FAILED):
            wait_for_readers(store, rank, name, size)
            raise RuntimeError(f"rank {rank}: rank {other} {failure}: {text[len(_FAILED) :]}")
    return own, texts


def from_rank_0(store: Any, rank: int, size: int, key: str, make: Callable[[], str]) -> str:
    """Return on every rank what ``make`` returns on rank 0; if ``make`` raises, the other ranks raise RuntimeError.

    CommTimeoutError names rank 0 if it sets nothing before the store's timeout.
    """
    if rank == 0:
        try:
            value = make()
        except Exception as error:
            store.set(key, f"{_FAILED}{type(error).__name__}: {error}")
            wait_for_readers(store, rank, key, size)
            raise
        store.set(key, f"={value}")
        return value
    [answer] = values_at(store, rank, {0: key})
    if answer.startswith(_FAILED):
        wait_for_readers(store, rank, key, size)
        raise RuntimeError(f"dist_prims: rank {rank}: the group is not created, because rank 0 failed: {answer[1:]}")
    return answer[1:]


def wait_for_readers(store: Any, rank: int, key: str, size: int) -> None:
    """Count this rank as a reader of the error under ``key``, for SECONDS_FOR_READERS at most.

    Every rank calls this before it raises the error. Rank 0 waits until all others have: the store may end with it.
    """
    with contextlib.suppress(TimeoutError, dist.DistError):  # the caller raises the error that was read
        if rank:
            store.add(f"{key}/read", 1)
        else:
            deadline = time.monotonic() + SECONDS_FOR_READERS
            until(lambda: store.add(f"{key}/read", 0) == size - 1, deadline, "the readers")
