"""``grow()`` and ``join()``: new ranks join a running group at a point on which all of its ranks agree.

New ranks announce themselves at the *meeting*, a store that they and rank 0 of the running ranks can reach. Each
announcement has a number, and the random *token* of the new rank, which is in the keys that follow:

    new rank, in join()                 meeting                 rank 0 of the running ranks, in grow()
    1. announces itself          -->    waiting/NUMBER   -->    reads the announcements since the last call
    2. sees that it is invited   <--    invited/TOKEN    <--    invites it (or refuses it, by refused/TOKEN)
    3. confirms that it waits    -->    ready/TOKEN      -->    waits 2 s for that, and broadcasts the tokens
    4. makes the group           <--    admitted/TOKEN   <--    describes the new group; all running ranks make it
    5. returns the group         <--    outcome          <--    says that all running ranks have made it

The outcome is in the store of the new group, all other keys at the meeting. The running ranks keep their group until
all of them have made the new one (:func:`.survivors.make_together`), so they go on with it if a new rank dies.
"""

from __future__ import annotations

import functools
import json
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from ..agreement import broadcast_value, check_failures, failure_text
from ..backend.create import made_group, make_group
from ..backend.options import BackendOptions
from ..backend.origin import GroupRequest, Origin, Repairs, Trait
from ..rendezvous.deadline import call_in_thread, until
from ..rendezvous.group_secret import secret_of_group, would_lose_secret
from ..rendezvous.handshake import EARLIER_VERSION, signed, verified, version, warn
from ..rendezvous.hosts import host_id, network_number
from ..rendezvous.network import is_loopback, own_address, split_address
from ..rendezvous.secret import REMEDY, Secret
from ..rendezvous.served import connect, open_store
from ..torch_compat import backend_name, default_group, install_default_group, replace_group, timeout_of
from .reconfigure import reconfigure_handle, reconfigured_backend
from .repair_attempt import RepairAttempt, store_prefix
from .shrink import next_name, repairable_backend, shrink_backend
from .survivors import MADE, make_together

__all__: list[str] = []

_PREFIX = "dist_prims/join"  # of the keys at the meeting
_TIME_FOR_MEETING = 5.0  # seconds for rank 0 of the running ranks to reach the meeting
_TIME_TO_CONFIRM = 2.0  # seconds for invited ranks to confirm that they wait
_TIME_FOR_ADMISSION = 20.0  # seconds after which a new rank announces itself again
_OUTCOME = "outcome"  # the key
_TIME_FOR_OUTCOME = 5.0  # seconds after the time for making the group
_MOST_AT_ONCE = 1024  # announcements that one call of grow() reads
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds for a new rank that could not make a group
_MOST_FAILURES = 32  # calls of grow() on one host: each one uses space of the group's log, which a repair needs
_SECRET_WOULD_BE_LOST = (
    "the running ranks have a secret of their launcher, which a new rank cannot know, and a group of several hosts "
    f"would have none; {REMEDY}"
)


@dataclass(frozen=True)
class _Admission:
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
class _NewRank:
    """A process that wants to join, as it has announced itself."""

    host: str  # its host_id()
    network: str  # the number of its network namespace
    version: str = EARLIER_VERSION  # of its library; the default stands for a library that announces no version


def grow(at: str | dist.Store, *, timeout: float = 30.0) -> dist.ProcessGroup:
    """Admit the ranks that wait in :func:`join`, and return the default group. All of its ranks must call this.

    >>> import subprocess, sys, tempfile, dist_prims
    >>> newcomer = '''
    ... import sys, torch, torch.distributed as dist, dist_prims
    ... dist_prims.join(sys.argv[1])
    ... total = torch.ones(1)
    ... dist.all_reduce(total)
    ... print("rank", dist.get_rank(), "of", dist.get_world_size(), "has", total.item())
    ... dist.destroy_process_group()
    ... '''
    >>> def run_until_three(place):
    ...     while dist.get_world_size() < 3:
    ...         grow(place)
    ...     dist.all_reduce(torch.ones(1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     place = f"file://{folder}/place"
    ...     command = [sys.executable, "-c", newcomer, place]
    ...     other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    ...     found = dist_prims.spawn(run_until_three, 2, (place,), backend="dist_prims", timeout=100)
    ...     print(other.communicate(timeout=60)[0])
    rank 2 of 3 has 3.0
    <BLANKLINE>

    Where the ranks have a secret (``docs/security.md``), a new rank needs the same secret. It can be a secret that the
    user provides or, if ``at`` is at the loopback interface, the secret of this user, but not a secret of spawn or MPI.

    A group on one host refuses a new rank of another host, with a warning, if that rank cannot reach the others or
    would cost them the secret of their launcher (``docs/repair.md``).

    ``at`` is where new ranks announce themselves: a URL, ``file://`` with the path of a file that all ranks can reach
    and that the job removes at its end, or ``tcp://host:port`` of a TCPStore; or a store. It is used by rank 0 only.

    Without new ranks the call costs a broadcast. Otherwise the new group takes the place of the default group, and all
    other groups are destroyed. The ranks keep their numbers, and the new ranks have the next ones. If a new rank dies
    before all have made the group, within ``timeout`` seconds, the ranks go on with the group that they have.
    """
    old = default_group()
    backend = repairable_backend(old, "grow")
    # 1. Rank 0 invites the new ranks that it does not refuse.
    meeting, tokens, failure, is_remote = None, list[str](), None, False
    if backend.rank() == 0 and not _has_failed_too_often(backend):
        try:
            meeting = _open_meeting(at, time.monotonic() + _TIME_FOR_MEETING)
            if backend.spans_hosts and would_lose_secret(own_address()):
                raise RuntimeError(f"grow: {_SECRET_WOULD_BE_LOST}")
            new_ranks = _read_announcements(meeting).items()
            fit = {token: new for token, new in new_ranks if not _refuses(meeting, token, new)}
            is_remote = any(new.host != host_id() for new in fit.values())
            tokens = _invite(meeting, [*fit])
        except (OSError, RuntimeError, ValueError) as error:
            failure = error
    # 2. All running ranks learn the tokens, and the name of the agreement by which they make the group.
    text, agreement, tokens = broadcast_value((failure_text(failure), secrets.token_hex(8), tokens), 0, old)
    check_failures("grow", failure, [text], old)
    return _admit(old, meeting, agreement, tokens, timeout, is_remote) if tokens else old


def _has_failed_too_often(backend: Any) -> bool:
    """Whether the group admits no more ranks. The registers of several hosts have room for any number of failures."""
    return not backend.spans_hosts and made_group(backend.options.group_name).failed_grows >= _MOST_FAILURES


def _refuses(meeting: dist.Store, token: str, new: _NewRank) -> bool:
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
        reason = _SECRET_WOULD_BE_LOST
    else:
        return False
    warn(f"a process on {new.host} that wants to join is refused: {reason}")
    return True


def _admit(
    old: dist.ProcessGroup, meeting: dist.Store | None, agreement: str, tokens: list[str], limit: float, is_remote: bool
) -> dist.ProcessGroup:
    """Make the group of the running ranks and the new ranks. Return it, or the old group if that fails.

    Args:
        old: the group of the running ranks.
        meeting: None on all ranks but 0.
        agreement: the name of the agreement.
        tokens: of the new ranks, in the order of their numbers.
        limit: seconds for making the group.
        is_remote: on rank 0, whether some of the new ranks are on other hosts.
    """
    backend = repairable_backend(old, "grow")
    rank, size, name = backend.rank(), backend.size(), next_name(backend.options.group_name)
    old_made_group = made_group(backend.options.group_name)

    def publish_admissions(address: str) -> None:  # on rank 0, which serves the store of the new group
        assert meeting is not None
        secret = secret_of_group(meeting, True)
        for number, token in enumerate(tokens):
            admission = _Admission(
                store=address,
                prefix=store_prefix(old_made_group.attempt, agreement, 0),
                name=name,
                kind=backend_name(old),
                rank=size + number,
                size=size + len(tokens),
                timeout=timeout_of(old, torch.device("cpu")).total_seconds(),
                limit=limit,
                traits=old_made_group.request.heritage.value,
                options=_given_options(old_made_group.request.given),
            )
            meeting.set(f"admitted/{token}", signed(secret, ("admitted", token), json.dumps(vars(admission))))

    attempt = RepairAttempt(backend, name, limit, agreement, len(tokens), is_remote, serving=publish_admissions)
    old_made_group.undecided_grow = agreement  # remains if run() raises: shrink() prevents that group
    if not attempt.run(make_together(rank, 0, tuple(range(size)))):
        old_made_group.undecided_grow = ""
        old_made_group.failed_grows += 1
        if rank == 0 and _has_failed_too_often(backend):
            warn(f"new ranks have failed {_MOST_FAILURES} times to join; this group admits no more")
        return old  # the new ranks find no outcome, and announce themselves again
    if rank == 0:
        attempt.store.set(_OUTCOME, MADE)
        if old_made_group.key and not made_group(name).key:
            warn(f"the new ranks are on another host, and the ranks are no longer authenticated; {REMEDY}")
    return replace_group(old, attempt.backend, attempt.store, range(size), name)


def join(at: str | dist.Store, *, timeout: float = 300.0) -> dist.ProcessGroup:
    """Wait until the running ranks admit this process by :func:`grow`, and return the default group.

    ``at`` is the place at which they look; the example of :func:`grow` shows both sides. Raises TimeoutError after
    ``timeout`` seconds, and RuntimeError if the running ranks have another version of the library than this process.

    >>> import dist_prims
    >>> def join_in_a_group():
    ...     try:
    ...         join("file:///path/of/the/job")
    ...     except RuntimeError as error:
    ...         return str(error)
    >>> dist_prims.spawn(join_in_a_group, 1)
    ['join: this process has a default group already; only a new process can join']
    """
    if dist.is_initialized():
        raise RuntimeError("join: this process has a default group already; only a new process can join")
    deadline = time.monotonic() + timeout
    meeting = _open_meeting(at, deadline)
    pause = _FIRST_PAUSE
    while True:
        admission = _wait_for_admission(meeting, deadline)
        if admission is None:
            continue
        limit = min(admission.limit + _TIME_FOR_OUTCOME, max(deadline - time.monotonic(), 0.1))
        try:  # on a thread, which is left behind if the process of the store is stopped and no answer comes
            make_group_and_store = functools.partial(_make_group, admission)
            backend, store = call_in_thread(make_group_and_store, limit, discard=lambda made: made[0].abort())
        except (OSError, RuntimeError) as error:  # also CommError: a rank has failed, and the others go on without us
            if time.monotonic() > deadline:
                raise TimeoutError(f"join: no group within {timeout:g} s: {error}") from error
            # A failed attempt costs the running ranks time: the timeout of grow(), if they cannot reach this rank.
            time.sleep(min(pause, max(deadline - time.monotonic(), 0)))
            pause = min(2 * pause, _LONGEST_PAUSE)
            continue
        backend.set_timeout(timedelta(seconds=admission.timeout))
        return install_default_group(backend, store, admission.name, admission.kind)


def _wait_for_admission(meeting: dist.Store, deadline: float) -> _Admission | None:
    """Return the group to which the running ranks admit this process; None if they have gone on without it."""
    token, secret = secrets.token_hex(16), secret_of_group(meeting, True)
    _announce(meeting, token, secret, deadline)
    meeting.set(f"ready/{token}", "")
    try:
        limit = min(deadline, time.monotonic() + _TIME_FOR_ADMISSION)
        until(lambda: meeting.check([f"admitted/{token}"]), limit, "the running ranks, which have invited this one")
    except TimeoutError:
        if time.monotonic() > deadline:
            raise
        return None
    texts = verified(meeting.get(f"admitted/{token}"), secret, ("admitted", token))
    return _Admission(**json.loads(texts[0])) if texts else None


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


def _make_group(admission: _Admission) -> tuple[Any, dist.Store]:
    """Make the group on a new rank; return its backend and store when all running ranks have made it as well."""
    store = dist.PrefixStore(admission.prefix, open_store(admission.store, admission.size, admission.limit))
    backend = make_group(
        GroupRequest(
            store=store,
            name=admission.name,
            rank=admission.rank,
            size=admission.size,
            timeout=timedelta(seconds=admission.limit),
            ranks=[],
            given=BackendOptions(**admission.options) if admission.options else None,
            origin=Origin.GROWN,
            repairs=Repairs(shrink_backend, reconfigure_handle, reconfigured_backend),
            inherited=Trait(admission.traits),
        )
    )
    try:
        deadline = time.monotonic() + admission.limit
        until(lambda: store.check([_OUTCOME]), deadline, "the outcome on the running ranks")
        if store.get(_OUTCOME) != MADE.encode():
            raise RuntimeError("a running rank could not make the group")
    except (OSError, RuntimeError):
        backend.abort()
        raise
    return backend, store


def _open_meeting(at: str | dist.Store, deadline: float) -> dist.Store:
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
        socket.create_connection(server, _TIME_FOR_MEETING).close()
    except OSError:
        return False
    return True


def _read_announcements(meeting: dist.Store) -> dict[str, _NewRank]:
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
        warn(f"a process that wants to join is refused: it does not know the secret of this job; {REMEDY}")
    new_ranks = {texts[0]: _NewRank(*texts[1:4]) for texts in announcements if texts and len(texts) >= 3}
    answered = {token for token in new_ranks for key in ("invited", "refused") if meeting.check([f"{key}/{token}"])}
    return {token: new for token, new in new_ranks.items() if token not in answered}


def _invite(meeting: dist.Store, tokens: list[str]) -> list[str]:
    """Invite the new ranks with these tokens; return the tokens of those that have confirmed that they wait."""
    for token in tokens:
        meeting.set(f"invited/{token}", "")
    ready = [f"ready/{token}" for token in tokens]
    deadline = time.monotonic() + _TIME_TO_CONFIRM
    try:
        until(lambda: meeting.check(ready), deadline, "the new ranks")
    except TimeoutError:
        tokens = [token for token in tokens if meeting.check([f"ready/{token}"])]
    return tokens


def _given_options(options: BackendOptions | None) -> dict[str, Any]:
    """Return the arguments of BackendOptions that are given; ``one_shot_bytes=0`` is one of them."""
    if options is None:
        return {}
    others = {name: getattr(options, name) for name in ("slot_bytes", "one_shot_bytes", "transport")}
    return {name: value for name, value in {**options.algorithms, **others}.items() if value not in ("", None)}
