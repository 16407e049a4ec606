"""The meeting, at which new ranks announce themselves to a running group: :func:`.grow` and :func:`.join` use it.

It is a store that the new ranks and rank 0 of the running ranks can reach. Each announcement has a number, and the
random *token* of the new rank, which is in the keys that follow:

    new rank, in join()                 meeting                 rank 0 of the running ranks, in grow()
    1. announces itself          -->    waiting/NUMBER   -->    reads the announcements since the last call
    2. sees that it is invited   <--    invited/TOKEN    <--    invites it (or refuses it, by refused/TOKEN)
    3. says where it listens     -->    ready/TOKEN      -->    waits 2 s for that, and broadcasts tokens and addresses
    4. makes the group           <--    admitted/TOKEN   <--    describes the new group; all running ranks make it
    5. returns the group         <--    outcome          <--    says that all running ranks have made it

The outcome is in the store of the new group, all other keys at the meeting. The running ranks keep their group until
all of them have made the new one (:func:`.survivors.make_together`), so they go on with it if a new rank dies: nothing
listens at its address then. The other new ranks learn from failed/PREFIX that the group is not made.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from .._output import print_notice
from ..rendezvous.deadline import until
from ..rendezvous.group_secret import secret_of_group, would_lose_secret
from ..rendezvous.handshake import EARLIER_VERSION, signed, verified, version
from ..rendezvous.hosts import host_id, network_number
from ..rendezvous.network import LOOPBACK, is_loopback, own_address, split_address
from ..rendezvous.secret import REMEDY, Secret
from ..rendezvous.served import connect, listening_address

__all__: list[str] = []

_PREFIX = "dist_prims/join"  # of the keys at the meeting
TIME_FOR_MEETING = 5.0  # seconds for rank 0 of the running ranks to reach the meeting
_TIME_TO_CONFIRM = 2.0  # seconds for invited ranks to confirm that they wait
_TIME_FOR_ADMISSION = 20.0  # seconds after which a new rank announces itself again
_MOST_AT_ONCE = 1024  # announcements that one call of grow() reads
SECRET_WOULD_BE_LOST = (
    "the running ranks have a secret of their launcher, which a new rank cannot know, and a group of several hosts "
    f"would have none; {REMEDY}"
)


@dataclass(frozen=True)
class Admission:
    """What a new rank needs to know to make the group: the text at ``admitted/TOKEN``."""

    store: str  # the address of the store of the new group
    prefix: str  # of the keys in it
    name: str  # of the new group
    kind: str  # its backend, or the backends by device
    rank: int  # of the new rank in it
    size: int
    timeout: float  # of the group, in seconds
    limit: float  # seconds for making it
    traits: int  # a Trait: what the new group inherits from the group of the running ranks
    options: dict[str, Any]  # the BackendOptions of the running ranks, as far as they are given


@dataclass(frozen=True)
class NewRank:
    """A process that wants to join, as it has announced itself."""

    host: str  # its host_id()
    network: str  # the number of its network namespace
    version: str = EARLIER_VERSION  # of its library; the default stands for a library that announces no version


def open_meeting(at: str | dist.Store, deadline: float) -> dist.Store:
    if isinstance(at, dist.Store):
        return dist.PrefixStore(_PREFIX, at)
    url = urlsplit(at)
    if url.scheme == "file" and url.path:
        return dist.PrefixStore(_PREFIX, dist.FileStore(url.path))
    if url.scheme == "tcp":
        server = split_address(url.netloc)
        until(lambda: _is_listening(server), deadline, f"a store at {at}")  # torch's client would try for longer
        return dist.PrefixStore(_PREFIX, connect(*server, 1, _TIME_FOR_ADMISSION))
    raise ValueError(f"the place of new ranks is {at!r}; give file:///path, tcp://host:port, or a store")


def _is_listening(server: tuple[str, int]) -> bool:
    try:
        socket.create_connection(server, TIME_FOR_MEETING).close()
    except OSError:
        return False
    return True


def read_announcements(meeting: dist.Store) -> dict[str, NewRank]:
    """Return by token the new ranks that have announced themselves since the last call and have no answer yet."""
    # 1. The numbers of the announcements: "waiting" counts all of them, and "served" those that have been read.
    first = meeting.add("served", 0) + 1
    last = min(meeting.add("waiting", 0), first + _MOST_AT_ONCE - 1)
    if first > last:
        return {}
    meeting.add("served", last - first + 1)
    # 2. Their texts. A new rank counts its announcement before it sets the text, and may die between the two.
    deadline = time.monotonic() + _TIME_TO_CONFIRM
    keys = [f"waiting/{number}" for number in range(first, last + 1)]
    try:
        until(lambda: meeting.check(keys), deadline, "the names of new ranks")
    except TimeoutError:
        keys = [key for key in keys if meeting.check([key])]
    # 3. The new ranks. Some have announced themselves several times, and have an answer to an earlier announcement.
    secret = secret_of_group(meeting, True)
    announcements = [verified(meeting.get(key), secret, ("waiting",)) for key in keys]
    if None in announcements:
        print_notice(f"a process that wants to join is refused: it does not know the secret of this job; {REMEDY}")
    new_ranks = {texts[0]: NewRank(*texts[1:4]) for texts in announcements if texts and len(texts) >= 3}
    answered = {token for token in new_ranks for key in ("invited", "refused") if meeting.check([f"{key}/{token}"])}
    return {token: new for token, new in new_ranks.items() if token not in answered}


def invite(meeting: dist.Store, tokens: list[str], spans_hosts: bool) -> dict[str, str]:
    """Invite the new ranks with these tokens. Return the tokens of the new ranks that have confirmed that they wait.

    Each token has the address at which its rank listens while its process runs; empty if the rank has none.
    ``spans_hosts``: of the new group, whose ranks cannot reach the loopback address of each other.
    """
    for token in tokens:
        meeting.set(f"invited/{token}", "between hosts" if spans_hosts else "")
    ready = [f"ready/{token}" for token in tokens]
    deadline = time.monotonic() + _TIME_TO_CONFIRM
    try:
        until(lambda: meeting.check(ready), deadline, "the new ranks")
    except TimeoutError:
        tokens = [token for token in tokens if meeting.check([f"ready/{token}"])]
    secret = secret_of_group(meeting, True)
    replies = {token: verified(meeting.get(f"ready/{token}"), secret, ("ready", token)) for token in tokens}
    return {token: texts[0] for token, texts in replies.items() if texts}


def refuses(meeting: dist.Store, token: str, new: NewRank) -> bool:
    """Whether a new rank cannot be admitted because of its version or its host; a warning says why.

    A process of another version learns the reason. A process of another host waits on, for ranks that can admit it.
    """
    if new.version != version():
        reason = (
            f"it has {new.version}, and the running ranks have {version()}; install the same version of dist_prims for "
            "all ranks, and start that process again"
        )
        meeting.set(f"refused/{token}", signed(secret_of_group(meeting, True), ("refused", token), reason))
    elif new.host == host_id():
        return False
    elif is_loopback(own_address()) and new.network != str(network_number()):
        reason = (
            "the running ranks listen at the loopback interface, as init() chooses for one host; start them with "
            "GLOO_SOCKET_IFNAME set to the interface that leads to the other hosts"
        )
    elif would_lose_secret(own_address()):
        reason = SECRET_WOULD_BE_LOST
    else:
        return False
    print_notice(f"a process on {new.host} that wants to join is refused: {reason}")
    return True


def wait_for_admission(meeting: dist.Store, deadline: float) -> Admission | None:
    """Return the group to which the running ranks admit this process; None if they have gone on without it."""
    token, secret = secrets.token_hex(16), secret_of_group(meeting, True)
    host, listening = "", ""
    with contextlib.suppress(OSError, ValueError):  # before the announcement, because a name server may answer late
        host = own_address()
    _announce(meeting, token, secret, deadline)
    if not meeting.get(f"invited/{token}"):
        host = LOOPBACK
    with contextlib.suppress(OSError):  # the running ranks go without a sign of this process's death
        listening = listening_address(host) if host else ""
    meeting.set(f"ready/{token}", signed(secret, ("ready", token), listening))
    try:
        limit = min(deadline, time.monotonic() + _TIME_FOR_ADMISSION)
        until(lambda: meeting.check([f"admitted/{token}"]), limit, "the running ranks, which have invited this one")
    except TimeoutError:
        if time.monotonic() > deadline:
            raise
        return None
    texts = verified(meeting.get(f"admitted/{token}"), secret, ("admitted", token))
    return Admission(**json.loads(texts[0])) if texts else None


def _announce(meeting: dist.Store, token: str, secret: Secret | None, deadline: float) -> None:
    """Announce this process until the running ranks invite it: again and again, as the rank that reads it may die."""

    def is_invited() -> bool:
        key = f"refused/{token}"
        if meeting.check([key]) and (reason := verified(meeting.get(key), secret, ("refused", token))):
            raise RuntimeError(f"join: the running ranks refuse this process: {reason[0]}")
        return meeting.check([f"invited/{token}"])

    text = signed(secret, ("waiting",), token, host_id(), str(network_number()), version())
    awaited = "the running ranks: none has called grow(), or they have refused this process, see their warnings"
    while True:
        meeting.set(f"waiting/{meeting.add('waiting', 1)}", text)
        limit = min(deadline, time.monotonic() + _TIME_FOR_ADMISSION)
        try:
            until(is_invited, limit, awaited)
            return
        except TimeoutError:
            if time.monotonic() > deadline:
                raise
