"""Handshake of the ranks in a store: they agree on the ranks of *this* attempt to meet, and that all know the secret.

A store outlives the ranks that use it. torchrun keeps one for all attempts of a job, and a file stays after a crash;
gloo would then read the addresses of dead processes and fail to connect. Neither a restart count (it does not change
when hosts are added or removed) nor a key that was written earlier is reliable evidence of the current attempt. And
every process that can connect to the store can write to it.

1. Each rank but 0 writes a *hello* under its rank: a random token, its host and the version of its library.
2. Rank 0 answers *that token* with a *welcome*: a random name for this attempt. It answers again when a token changes.
3. Each rank acknowledges the name. When all have, rank 0 publishes the hosts of all ranks, and the first version of the
   library that differs from its own: then every rank raises, because the ranks would misread each other's messages.
4. Each rank deletes its own keys and the answer to it, which no rank reads any more. The hosts stay until the ranks
   have met by other means: ``backend/create.py`` deletes them.

If the ranks have a secret, each of these texts is *signed*: it ends in a code that only the secret can make, over the
rank, the token, the name, the group and what the text is for. Each attempt has new tokens and a new name, so a text of
an earlier attempt has no effect, and neither has a text of another group of the job.

Rank 0 ignores a hello without the right code, with a warning and a note that the writer of the hello can read;
other ranks ignore an answer without the right code. So another process can neither take the place of a rank nor end the
attempt by one text.

All later keys have the name as their prefix, under which no key of an earlier attempt can exist.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch.distributed as dist

from .deadline import until
from .hosts import host_id
from .rank_values import SECONDS_FOR_READERS
from .secret import REMEDY, Secret

__all__: list[str] = []

# Each change of what ranks send to each other raises this number: the descriptions of calls (csrc/common/types.h,
# collectives/call_agreement.py, agreement.py), other messages, and the shared memory of a host.
PROTOCOL = 4
EARLIER_VERSION = "an earlier version"  # before protocol 1: it sends no version
HOSTS = "hosts"  # the key of the hosts of all ranks, below the name of the attempt
_SECONDS_TO_READ = 1.0  # for a rank that is refused, before the store ends with rank 0
_LONGEST = 1 << 20  # bytes of a text: the hosts of some 20,000 ranks
_MOST_NAMED = 16  # ranks in the text of an error
_TOKEN = re.compile("[0-9a-f]{16}")
_REASONS = {
    "missing": "rank 0 has a secret, and this rank has none",
    "other": "rank 0 has another secret than this rank",
    "none": "this rank has a secret, and rank 0 has none",
}


def handshake(
    store: dist.Store,
    rank: int,
    size: int,
    deadline: float,
    secret: Secret | None,
    group: str,
    check: Callable[[], None] = lambda: None,
) -> tuple[str, list[str]]:
    """Do the handshake. Return the name of this attempt and the host of each rank.

    Every rank calls this. TimeoutError names the ranks that are missing. RuntimeError on every rank if two ranks have
    different versions of the library; a rank whose version is before protocol 1 waits until the deadline.

    Args:
        store: in which the ranks meet; other ranks and earlier attempts may have left keys there.
        rank, size: this rank, and the number of ranks.
        deadline: on the clock of time.monotonic().
        secret: of the ranks; None if they are not authenticated.
        group: a name that all ranks of the group know, and by which it differs from the other groups of the job.
        check: called at intervals during the wait, which passes on its exceptions.
    """
    secret = secret.of_group(group) if secret else None
    participant = _Rank0(store, size, secret) if rank == 0 else _OtherRank(store, rank, size, secret)
    name, (*hosts, difference) = participant.join(deadline, check)
    if difference:
        raise RuntimeError(
            f"rank {rank}: the group cannot be made: {difference}; install the same version of dist_prims for all "
            "ranks, and start them again"
        )
    return name, hosts


def version() -> str:
    """The version of the library, which must be the same on all ranks of a group."""
    library = import_module("dist_prims")  # which imports this module when a name of it is first used
    return f"dist_prims {library.__version__} (protocol {PROTOCOL})"


class _OtherRank:
    """The handshake on a rank other than rank 0."""

    def __init__(self, store: dist.Store, rank: int, size: int, secret: Secret | None) -> None:
        self._store, self._rank, self._size, self._secret = store, rank, size, secret
        self._token = secrets.token_hex(8)
        self._refusal = ""

    def join(self, deadline: float, check: Callable[[], None]) -> tuple[str, list[str]]:
        """Return the name of the attempt and what rank 0 published: the hosts, and a difference or an empty text."""
        hello = signed(self._secret, ("hello", self._rank, self._size), self._token, host_id(), version())
        name, published = "", []

        def is_answered() -> bool:
            nonlocal name
            check()
            self._store.set(f"hello/{self._rank}", hello)  # repeated, because an old group may still remove its file
            name = self._answer()
            return bool(name)

        def is_complete() -> bool:
            nonlocal published
            check()
            if self._store.check([f"{name}/{HOSTS}"]):
                published = verified(self._store.get(f"{name}/{HOSTS}"), self._secret, ("hosts", name)) or []
            return len(published) >= self._size

        # 1. Hello, until rank 0 has answered.
        self._wait(is_answered, deadline, lambda: "rank 0")
        # 2. The acknowledgement, and the hosts of all ranks.
        acknowledgement = signed(self._secret, ("acknowledgement", self._rank, self._token), name)
        acknowledged = f"{name}/acknowledged/{self._rank}"
        self._store.set(acknowledged, acknowledgement)
        self._wait(is_complete, deadline, lambda: self._awaited_ranks(name))
        # 3. No rank reads the keys of this rank any more.
        with contextlib.suppress(RuntimeError):  # a store of the user may be unable to; the keys use memory only
            for key in (f"hello/{self._rank}", f"welcome/{self._token}", acknowledged):
                self._store.delete_key(key)
        if len(published) == self._size:  # the hosts alone, as rank 0 of an earlier version publishes
            published.append(f"rank 0 has {EARLIER_VERSION}, and rank {self._rank} has {version()}")
        return name, published

    def _wait(self, done: Callable[[], bool], deadline: float, awaited: Callable[[], str]) -> None:
        try:
            until(done, deadline, "")
        except TimeoutError:
            text = f"no sign of {awaited()}"
            raise TimeoutError(f"{text}; {self._refusal}" if self._refusal else text) from None

    def _awaited_ranks(self, name: str) -> str:
        """What a text at the deadline names: ranks that have not come, else rank 0, which may not be the cause."""
        with contextlib.suppress(RuntimeError):  # the store may have ended with rank 0
            keys = [f"hello/{rank}" for rank in range(1, self._size)]
            # Ranks that have ended the handshake delete their keys, after rank 0 has published the hosts.
            is_published = self._store.check([f"{name}/{HOSTS}"])
            if not is_published and (missing := _missing_keys(self._store, keys, _MOST_NAMED)):
                return f"ranks {[int(key.removeprefix('hello/')) for key in missing]}"
        return "rank 0, which may itself wait for another rank"

    def _answer(self) -> str:
        """The name of this attempt; empty as long as rank 0 has not answered."""
        key = f"welcome/{self._token}"
        if not self._store.check([key]):
            return ""
        welcome = self._store.get(key)
        texts = verified(welcome, self._secret, ("welcome", self._rank, self._token))
        if texts and len(texts) == 1:
            return texts[0]
        if not self._refusal:
            self._note_refusal((_texts(welcome) or [""])[0])
        return ""

    def _note_refusal(self, why: str) -> None:
        """Keep why rank 0 refuses this rank. A rank with a secret goes on waiting, because the reason is not signed:
        another process may have written it."""
        reason = _REASONS.get(why, "what should be the answer of rank 0 was written by a process without the secret")
        self._refusal = f"rank {self._rank} of {self._size} cannot join: {reason}; {REMEDY}"
        if self._secret is None:
            raise RuntimeError(self._refusal)
        warn(self._refusal)


class _Answer(NamedTuple):
    """What rank 0 knows of a rank that it has answered."""

    token: str
    host: str
    version: str


class _Rank0:
    """The handshake on rank 0, which answers the others."""

    def __init__(self, store: dist.Store, size: int, secret: Secret | None) -> None:
        self._store, self._size, self._secret = store, size, secret
        self._name = secrets.token_hex(8)
        self._answered: dict[int, _Answer] = {}  # by rank
        self._last: dict[int, bytes] = {}  # the last hello, by rank
        self._refused: dict[int, str] = {}  # what was wrong with the secret, by rank

    def join(self, deadline: float, check: Callable[[], None]) -> tuple[str, list[str]]:
        """Return the name of the attempt and what this rank publishes: the hosts, and a difference or an empty text."""

        def is_acknowledged() -> bool:
            check()
            for rank, hello in self._hellos():
                self._answer(rank, hello)
            return self._is_acknowledged()

        try:
            until(is_acknowledged, deadline, "the others")
        except TimeoutError as error:
            raise TimeoutError(self._missing()) from error
        ranks = [_Answer("", host_id(), version()), *(self._answered[rank] for rank in range(1, self._size))]
        other = next((rank for rank, answer in enumerate(ranks) if answer.version != version()), 0)
        difference = f"rank 0 has {version()}, and rank {other} has {ranks[other].version}" if other else ""
        published = [*(answer.host for answer in ranks), difference]
        self._store.set(f"{self._name}/{HOSTS}", signed(self._secret, ("hosts", self._name), *published))
        if difference:  # the store may end with this rank
            self._wait_for_readers()
        return self._name, published

    def _wait_for_readers(self) -> None:
        """Return when the other ranks have read what was published, and deleted their keys; else after some seconds."""
        keys = [f"{self._name}/acknowledged/{rank}" for rank in range(1, self._size)]

        def have_read() -> bool:
            return not any(self._store.check([key]) for key in keys)

        with contextlib.suppress(TimeoutError):
            until(have_read, time.monotonic() + SECONDS_FOR_READERS, "the others")

    def _hellos(self) -> list[tuple[int, bytes]]:
        """The hello of each rank that has written one, in few requests to the store."""
        keys = {rank: f"hello/{rank}" for rank in range(1, self._size)}
        if not self._store.check([*keys.values()]):  # of some ranks, or none
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return [*zip(keys, self._store.multi_get([*keys.values()]), strict=True)] if keys else []

    def _answer(self, rank: int, hello: bytes) -> None:
        """Answer a hello that was not answered yet. The one before it may have been of an earlier attempt."""
        if self._last.get(rank) == hello:
            return
        self._last[rank] = hello
        *texts, code = _texts(hello) or [""]
        if len(texts) < 2 or not _TOKEN.fullmatch(texts[0]):
            return
        token, host, its_version, *_ = *texts, EARLIER_VERSION  # a later version may send more texts
        if not verified(hello, self._secret, ("hello", rank, self._size)):
            return self._refuse(rank, token, has_secret=code != "")
        self._answered[rank] = _Answer(token, host, its_version)
        self._store.set(f"welcome/{token}", signed(self._secret, ("welcome", rank, token), self._name))

    def _refuse(self, rank: int, token: str, has_secret: bool) -> None:
        """Answer that the writer of a hello has a wrong secret or none; raise if this rank has none itself."""
        why = "none" if self._secret is None else "other" if has_secret else "missing"
        self._store.set(f"welcome/{token}", signed(None, (), why, ""))
        if self._secret is None:  # no rank is authenticated, so another process could do more harm than this error
            time.sleep(_SECONDS_TO_READ)
            raise RuntimeError(f"rank {rank} of {self._size} has a secret, and rank 0 has none; {REMEDY}")
        if rank not in self._refused:
            self._refused[rank] = "another secret than rank 0" if has_secret else "no secret"
            warn(f"rank 0 refuses a process as rank {rank} of {self._size}: it has {self._refused[rank]}; {REMEDY}")

    def _is_acknowledged(self) -> bool:
        keys = [f"{self._name}/acknowledged/{rank}" for rank in range(1, self._size)]
        if len(self._answered) < self._size - 1 or not self._store.check(keys):
            return False
        return all(
            verified(text, self._secret, ("acknowledgement", rank, self._answered[rank].token)) == [self._name]
            for rank, text in enumerate(self._store.multi_get(keys), start=1)
        )

    def _missing(self) -> str:
        """What the error at the deadline says."""
        missing = [rank for rank in range(1, self._size) if rank not in self._answered]
        if not missing:
            return "no acknowledgement of a rank"
        refused = [
            f"; a process that came as rank {rank} has {self._refused[rank]}"
            for rank in missing
            if rank in self._refused
        ]
        return f"no sign of ranks {missing}" + (f"{refused[0]}; {REMEDY}" if refused else "")


def _missing_keys(store: dist.Store, keys: list[str], most: int) -> list[str]:
    """The first keys that the store does not have, ``most`` of them, by few requests."""
    if most == 0 or not keys or store.check(keys):
        return []
    if len(keys) == 1:
        return keys
    half = len(keys) // 2
    found = _missing_keys(store, keys[:half], most)
    return found + _missing_keys(store, keys[half:], most - len(found))


def signed(secret: Secret | None, context: tuple[str | int, ...], *texts: str) -> str:
    """The texts as JSON, with a code that is valid in this context; the code is empty without a secret.

    ``context``: what the text is for, and what it belongs to; reader and writer know it.
    """
    return json.dumps([*texts, secret.code(*context, *texts) if secret else ""])


def verified(text: bytes, secret: Secret | None, context: tuple[str | int, ...]) -> list[str] | None:
    """The texts that were signed in this context; None if the code is wrong."""
    *texts, code = _texts(text) or [""]
    is_right = secret.is_code(code, *context, *texts) if secret else code == ""
    return texts if is_right and texts else None


def _texts(text: bytes) -> list[str] | None:
    """The texts and the code; None for anything that :func:`signed` does not write."""
    try:
        texts = json.loads(text) if len(text) <= _LONGEST else None
    except (ValueError, RecursionError):
        return None
    is_right = isinstance(texts, list) and len(texts) > 0 and all(isinstance(item, str) for item in texts)
    return texts if is_right else None


def warn(text: str) -> None:
    print(f"dist_prims: {text}", file=sys.stderr, flush=True)
