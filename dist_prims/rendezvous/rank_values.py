"""Values that ranks of a group publish in its store while the group is made."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch.distributed as dist

from ..errors import CommTimeoutError, PeerDiedError
from .deadline import until

__all__: list[str] = []

SECONDS_FOR_READERS = 10.0  # enough, because all ranks are connected to the store
_WORD_END = re.compile("(?<=[ :])")
_FAILED = "!"  # the first character of a value that is the text of an error


def values_of_ranks(store: Any, rank: int, name: str, size: int) -> list[str]:
    """Return what each rank r has set under ``name/r``; CommTimeoutError names the ranks that have set nothing.

    Every rank of the group calls this. Rank 0 reads the values, and publishes all of them in one value under ``name``:
    if every rank read the value of every rank, the store would serve n^2 values. If rank 0 cannot read them, it
    publishes its error instead, and all ranks raise.
    """
    keys = {other: f"{name}/{other}" for other in range(size)}
    if rank == 0:
        try:
            values = values_at(store, rank, keys)
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):  # the store itself may be the cause
                store.set(name, f"{_FAILED}{error}")
                late = {*missing_keys(store, [*keys.values()], most=size)}
                wait_for_readers(store, rank, name, size, {other for other, key in keys.items() if key in late})
            raise
        store.set(name, f"={packed(values)}")
        return values
    try:
        answer = store.get(name).decode()
    except PeerDiedError:  # rank 0 may have found the death as well, and then waits for the note of this rank
        wait_for_readers(store, rank, name, size)
        raise
    except RuntimeError as error:  # after the timeout of the store, or for a value with a wrong code
        if not store.check([name]):
            timeout_error = _timeout_of(store, rank, name, keys)
            wait_for_readers(store, rank, name, size)  # rank 0, whose wait ends too, need not wait for this rank
            raise timeout_error from error
        answer = store.get(name).decode()
    if answer.startswith(_FAILED):
        is_late = bool(missing_keys(store, [*keys.values()], most=1))
        failure = _timeout_of(store, rank, name, keys) if is_late else RuntimeError(f"rank {rank}: {answer[1:]}")
        wait_for_readers(store, rank, name, size)
        raise failure
    return unpacked(answer[1:], name)


def _timeout_of(store: Any, rank: int, name: str, keys: Mapping[int, str]) -> CommTimeoutError:
    """The error of a rank, which names the ranks without a value; rank 0 if all have one."""
    missing = [key.removeprefix(f"{name}/") for key in missing_keys(store, [*keys.values()])]
    late = ", ".join(missing) or "0, which may itself wait for another rank"
    return timeout_while_made(rank, f"no sign of rank {late}")


def packed(texts: Sequence[str]) -> str:
    """Return these texts, at least one, as one compressed text.

    The first words of all texts stand together, then the second words, and so on. zlib then needs 6 bytes for the two
    addresses of a rank, which differ from the addresses of its host's other ranks in their ports alone, and 9 bytes
    if the texts stand one after the other.

    >>> unpacked(packed(["10.0.0.1:2000 10.0.0.1:3000", "[fd00::1]:2001", "no address"]))
    ['10.0.0.1:2000 10.0.0.1:3000', '[fd00::1]:2001', 'no address']
    """
    columns = [*zip_longest(*(_WORD_END.split(text) for text in texts))]
    return base64.b85encode(zlib.compress(json.dumps(columns, separators=(",", ":")).encode())).decode()


def unpacked(text: str, name: str = "") -> list[str]:
    """Return the texts of :func:`packed`; RuntimeError with the name of the value if it is another text."""
    try:
        columns = json.loads(zlib.decompress(base64.b85decode(text)))
        return ["".join(word for word in words if word is not None) for words in zip(*columns, strict=True)]
    except (ValueError, TypeError, zlib.error) as error:
        raise RuntimeError(f"the value of {name!r} in the store was not written by a rank of this group") from error


def missing_keys(store: Any, keys: list[str], most: int = 16) -> list[str]:
    """Return the first keys that the store does not have, at most ``most`` of them, by few requests."""
    if most == 0 or not keys or store.check(keys):
        return []
    if len(keys) == 1:
        return keys
    half = len(keys) // 2
    found = missing_keys(store, keys[:half], most)
    return found + missing_keys(store, keys[half:], most - len(found))


def values_at(store: Any, rank: int, keys: Mapping[int, str]) -> list[str]:
    """Return what other ranks have set, in the order of ``keys``, which has the key of each rank by the rank's number.

    The call waits for the timeout of the store at most; CommTimeoutError names the ranks that have set nothing.
    """
    try:
        return [value.decode() for value in store.multi_get([*keys.values()])]
    except RuntimeError as error:  # a FileStore raises RuntimeError, other stores its subclass DistStoreError
        missing = [str(other) for other, key in keys.items() if not store.check([key])]
        if not missing:  # the last value has come as the wait ended, or a value has a wrong code: then this raises
            return [value.decode() for value in store.multi_get([*keys.values()])]
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


def wait_for_readers(store: Any, rank: int, key: str, size: int, absent: Collection[int] = ()) -> None:
    """Note that this rank has read the error under ``key``. Every rank calls this before it raises the error.

    Rank 0 waits for the notes of the other ranks, for SECONDS_FOR_READERS at most: the store may end with it. It waits
    neither for the ``absent`` ranks nor for ranks that have died, if the store of the group detects deaths.
    """
    ended = getattr(store, "ended", list)

    def have_read() -> bool:
        gone = {*absent, *ended()}
        notes = [f"{key}/read/{reader}" for reader in range(1, size) if reader not in gone]
        return not notes or store.check(notes)

    with contextlib.suppress(TimeoutError, dist.DistError):  # the caller raises the error that was read
        if rank:
            store.set(f"{key}/read/{rank}", "")
        else:
            until(have_read, time.monotonic() + SECONDS_FOR_READERS, "the readers")
