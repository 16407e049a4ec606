"""Handshake of the ranks in a store: they agree on the ranks of *this* attempt to meet, and that all know the secret.

A store outlives the ranks that use it. torchrun keeps one for all attempts of a job, and a file stays after a crash;
gloo would then read the addresses of dead processes and fail to connect. Neither a restart count (it does not change
when hosts are added or removed) nor a key that was written earlier is reliable evidence of the current attempt. And
every process that can connect to the store can write to it.

1. Each rank but 0 writes a *hello* under its rank: a random token, its host, the version of its library, and a text of
   the caller, such as the addresses of the rank.
2. Rank 0 answers *that token* with a *welcome*: a random name for this attempt. It answers again when a token changes.
3. Each rank acknowledges the name. When all have, rank 0 publishes the hosts of all ranks, compressed, and a
   *decision*, which its caller makes from the hosts and the texts of all ranks. If a version of the library differs
   from its own, rank 0 publishes that instead, in the form of protocol 4, which has the hosts one by one: then every
   rank raises, because the ranks would misread each other's messages.
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
import time
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch.distributed as dist

from .._output import print_notice
from .deadline import until
from .hosts import host_id
from .rank_values import SECONDS_FOR_READERS, missing_keys, packed, unpacked
from .secret import REMEDY, Secret

__all__: list[str] = []

# Each change of what ranks send to each other raises this number: the descriptions of calls (csrc/common/types.h,
# collectives/call_agreement.py, agreement.py), other messages, and the shared memory of a host.
PROTOCOL = 8
EARLIER_VERSION = "an earlier version"  # before protocol 1: it sends no version
HOSTS = "hosts"  # the key of the hosts of all ranks, below the name of the attempt
_SECONDS_TO_READ = 1.0  # for a rank that is refused, before the store ends with rank 0
_BETWEEN_LOOKS = 0.1  # seconds between two looks of rank 0 at hellos that are not complete or not new
_FIRST_BETWEEN_HELLOS, _LONGEST_BETWEEN_HELLOS = 0.1, 1.0  # seconds; each hello is sent to the host of the store
_LONGEST = 1 << 20  # bytes of a text: the hosts of some 65,000 ranks in any order
_FAILED = "!"  # the first character of a decision that is the text of an error of rank 0
_TOKEN = re.compile("[0-9a-f]{16}")
_REASONS = {
    "missing": "rank 0 has a secret, and this rank has none",
    "other": "rank 0 has another secret than this rank",
    "none": "this rank has a secret, and rank 0 has none",
}


class Meeting(NamedTuple):
    """What a rank knows after the handshake."""

    attempt: str  # the name of this attempt, which is random
    hosts: list[str]  # by rank
    decision: str = ""  # of rank 0


Decide = Callable[[list[str], list[str]], str]  # from the hosts and the texts of all ranks, by rank, to the decision


def handshake(
    store: dist.Store,
    rank: int,
    size: int,
    deadline: float,
    secret: Secret | None,
    group: str,
    check: Callable[[], None] = lambda: None,
    text: str = "",
    decide: Decide = lambda hosts, texts: "",
) -> Meeting:
    """Do the handshake. Return what this rank then knows.

    Every rank calls this. TimeoutError names the ranks that are missing. RuntimeError on every rank if two ranks have
    different versions of the library; a rank whose version is before protocol 1 waits until the deadline. An exception
    of ``decide`` is raised on rank 0, and the other ranks raise RuntimeError with its text.

    Args:
        store: in which the ranks meet; other ranks and earlier attempts may have left keys there.
        rank, size: this rank, and the number of ranks.
        deadline: on the clock of time.monotonic().
        secret: of the ranks; None if they are not authenticated.
        group: a name that all ranks of the group know, and by which it differs from the other groups of the job.
        check: called at intervals during the wait, which passes on its exceptions.
        text: of this rank, for ``decide``.
        decide: called on rank 0 only.
    """
    secret = secret.of_group(group) if secret else None
    if rank == 0:
        return _Rank0(store, size, secret, text, decide).join(deadline, check)
    return _OtherRank(store, rank, size, secret, text).join(deadline, check)


def _difference_error(rank: int, difference: str) -> RuntimeError:
    """The error of a rank about two versions of the library."""
    return RuntimeError(
        f"rank {rank}: the group cannot be made: {difference}; install the same version of dist_prims for all ranks, "
        "and start them again"
    )


def version() -> str:
    """The version of the library, which must be the same on all ranks of a group."""
    library = import_module("dist_prims")  # which imports this module when a name of it is first used
    return f"dist_prims {library.__version__} (protocol {PROTOCOL})"


class _OtherRank:
    """The handshake on a rank other than rank 0."""

    def __init__(self, store: dist.Store, rank: int, size: int, secret: Secret | None, text: str) -> None:
        self._store, self._rank, self._size, self._secret = store, rank, size, secret
        self._text = text
        self._token = secrets.token_hex(8)
        self._refusal = ""

    def join(self, deadline: float, check: Callable[[], None]) -> Meeting:
        """Do the handshake on this rank."""
        hello = signed(self._secret, ("hello", self._rank, self._size), self._token, host_id(), version(), self._text)
        name, published = "", []
        next_hello, pause = 0.0, _FIRST_BETWEEN_HELLOS

        def is_answered() -> bool:
            nonlocal name, next_hello, pause
            check()
            if (now := time.monotonic()) >= next_hello:  # repeated, because an old group may still remove its file
                self._store.set(f"hello/{self._rank}", hello)
                next_hello, pause = now + pause, min(2 * pause, _LONGEST_BETWEEN_HELLOS)
            name = self._answer()
            return bool(name)

        def is_complete() -> bool:
            nonlocal published
            check()
            if self._store.check([f"{name}/{HOSTS}"]):
                published = verified(self._store.get(f"{name}/{HOSTS}"), self._secret, ("hosts", name)) or []
            return bool(published)

        # Step 1 of the module: hello, until rank 0 has answered (step 2).
        self._wait(is_answered, deadline, lambda: "rank 0")
        # Step 3: the acknowledgement, and the hosts of all ranks.
        acknowledgement = signed(self._secret, ("acknowledgement", self._rank, self._token), name)
        acknowledged = f"{name}/acknowledged/{self._rank}"
        self._store.set(acknowledged, acknowledgement)
        self._wait(is_complete, deadline, lambda: self._awaited_ranks(name))
        # Step 4: no rank reads the keys of this rank any more.
        with contextlib.suppress(RuntimeError):  # a store of the user may be unable to; the keys use memory only
            for key in (f"hello/{self._rank}", f"welcome/{self._token}", acknowledged):
                self._store.delete_key(key)
        return self._meeting(name, published)

    def _meeting(self, name: str, published: list[str]) -> Meeting:
        """What this rank knows by what rank 0 has published; RuntimeError if the group is not made."""
        hosts, decision, difference = published if len(published) == 3 else ["", "", published[-1]]
        if not difference:
            if decision.startswith(_FAILED):
                raise RuntimeError(
                    f"dist_prims: rank {self._rank}: the group is not created, because rank 0 failed: {decision[1:]}"
                )
            return Meeting(name, unpacked(hosts, f"{name}/{HOSTS}"), decision)
        if len(published) == self._size:  # the hosts alone, as rank 0 of an earlier version publishes
            difference = f"rank 0 has {EARLIER_VERSION}, and rank {self._rank} has {version()}"
        raise _difference_error(self._rank, difference)

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
            if not is_published and (missing := missing_keys(self._store, keys)):
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
        print_notice(self._refusal)


class _Answer(NamedTuple):
    """What rank 0 knows of a rank that it has answered."""

    token: str
    host: str
    version: str
    text: str


class _Rank0:
    """The handshake on rank 0, which answers the others."""

    def __init__(self, store: dist.Store, size: int, secret: Secret | None, text: str, decide: Decide) -> None:
        self._store, self._size, self._secret = store, size, secret
        self._text, self._decide = text, decide
        self._name = secrets.token_hex(8)
        self._acknowledgements = [f"{self._name}/acknowledged/{rank}" for rank in range(1, size)]  # their keys
        self._answered: dict[int, _Answer] = {}  # by rank
        self._looked = time.monotonic()  # when this rank last read hellos
        self._last: dict[int, bytes] = {}  # the last hello, by rank
        self._refused: dict[int, str] = {}  # what was wrong with the secret, by rank

    def join(self, deadline: float, check: Callable[[], None]) -> Meeting:
        """Do the handshake on rank 0."""

        def is_acknowledged() -> bool:
            check()
            for rank, hello in self._hellos():
                self._answer(rank, hello)
            return self._is_acknowledged()

        # Steps 1 to 3 of the module: answer hellos, until all ranks have acknowledged.
        try:
            until(is_acknowledged, deadline, "the others")
        except TimeoutError as error:
            raise TimeoutError(self._missing()) from error
        # Step 3: publish the hosts and the decision, or an error.
        ranks = [_Answer("", host_id(), version(), self._text), *(self._answered[it] for it in range(1, self._size))]
        hosts, decision = [answer.host for answer in ranks], ""
        failure: Exception | None = None
        other = next((rank for rank, answer in enumerate(ranks) if answer.version != version()), 0)
        if other:
            difference = f"rank 0 has {version()}, and rank {other} has {ranks[other].version}"
            failure = _difference_error(0, difference)
            published = [*hosts, difference]
        else:
            try:
                decision = self._decide(hosts, [answer.text for answer in ranks])
            except Exception as raised:
                failure, decision = raised, f"{_FAILED}{type(raised).__name__}: {raised}"
            published = [packed(hosts), decision, ""]
        text = signed(self._secret, ("hosts", self._name), *published)
        if len(text) > _LONGEST:  # the other ranks would not read it
            remedy = "give the ranks of each host consecutive numbers"
            failure = RuntimeError(f"rank 0: the hosts of {self._size} ranks need {len(text)} bytes of text; {remedy}")
            text = signed(self._secret, ("hosts", self._name), "", f"{_FAILED}RuntimeError: {failure}", "")
        self._store.set(f"{self._name}/{HOSTS}", text)
        # After an error the store may end with this rank, so the rank waits until the others have read the error.
        if failure:
            self._wait_for_readers()
            raise failure
        return Meeting(self._name, hosts, decision)

    def _wait_for_readers(self) -> None:
        """Return when the other ranks have read what was published, and deleted their keys; else after some seconds."""

        def have_read() -> bool:
            return not any(self._store.check([key]) for key in self._acknowledgements)

        with contextlib.suppress(TimeoutError):
            until(have_read, time.monotonic() + SECONDS_FOR_READERS, "the others")

    def _hellos(self) -> list[tuple[int, bytes]]:
        """The hello of each rank that has written one, in few requests to the store.

        They are read when all ranks have written one. Before that and afterwards, when a rank may replace the hello of
        an earlier attempt, they are read at intervals; in between the result is empty.
        """
        keys = {rank: f"hello/{rank}" for rank in range(1, self._size)}
        is_complete = self._store.check([*keys.values()])
        now = time.monotonic()
        if now - self._looked < _BETWEEN_LOOKS and (not is_complete or len(self._answered) == len(keys)):
            return []
        self._looked = now
        if not is_complete:  # some ranks, or none
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
        # An earlier version sends fewer texts, and a later one may send more.
        token, host, its_version, text, *_ = [*texts, *(EARLIER_VERSION, "")[len(texts) - 2 :]]
        if not verified(hello, self._secret, ("hello", rank, self._size)):
            return self._refuse(rank, token, has_secret=code != "")
        self._answered[rank] = _Answer(token, host, its_version, text)
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
            print_notice(
                f"rank 0 refuses a process as rank {rank} of {self._size}: it has {self._refused[rank]}; {REMEDY}"
            )

    def _is_acknowledged(self) -> bool:
        if len(self._answered) < self._size - 1 or not self._store.check(self._acknowledgements):
            return False
        return all(
            verified(text, self._secret, ("acknowledgement", rank, self._answered[rank].token)) == [self._name]
            for rank, text in enumerate(self._store.multi_get(self._acknowledgements), start=1)
        )

    def _missing(self) -> str:
        """What the error at the deadline says."""
        missing = [rank for rank in range(1, self._size) if rank not in self._answered]
        if not missing:
            late = [int(key.rpartition("/")[2]) for key in missing_keys(self._store, self._acknowledgements)]
            return f"no acknowledgement of ranks {late}" if late else "no acknowledgement with a right code"
        refused = [
            f"; a process that came as rank {rank} has {self._refused[rank]}"
            for rank in missing
            if rank in self._refused
        ]
        return f"no sign of ranks {missing}" + (f"{refused[0]}; {REMEDY}" if refused else "")


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
