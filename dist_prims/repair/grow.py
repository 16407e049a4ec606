"""``grow()`` and ``join()``: new ranks join a running group at a point on which all of its ranks agree.

They meet at a store, as :mod:`.meeting` describes, and make the new group through a store of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .._output import print_notice
from ..agreement import broadcast_value, check_failures, failure_text
from ..backend.create import made_group, make_group
from ..backend.options import BackendOptions
from ..backend.origin import GroupRequest, Origin, Repairs, Trait
from ..rendezvous.deadline import call_in_thread, until
from ..rendezvous.group_secret import secret_of_group, would_lose_secret
from ..rendezvous.handshake import signed
from ..rendezvous.hosts import host_id
from ..rendezvous.network import own_address
from ..rendezvous.secret import REMEDY
from ..rendezvous.served import open_store
from ..torch_compat import backend_name, default_group, install_default_group, replace_group, timeout_of
from .meeting import (
    SECRET_WOULD_BE_LOST,
    TIME_FOR_MEETING,
    Admission,
    invite,
    open_meeting,
    read_announcements,
    refuses,
    wait_for_admission,
)
from .reconfigure import reconfigure_handle, reconfigured_backend
from .repair_attempt import RepairAttempt, store_prefix
from .shrink import next_name, repairable_backend, shrink_backend
from .survivors import MADE, make_together

__all__: list[str] = []

_OUTCOME = "outcome"  # the key
_TIME_FOR_OUTCOME = 5.0  # seconds after the time for making the group
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds for a new rank that could not make a group
_MOST_FAILURES = 32  # calls of grow() on one host: each one uses space of the group's log, which a repair needs


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
    meeting, tokens, failure, is_remote = None, dict[str, str](), None, False
    if backend.rank() == 0 and not _has_failed_too_often(backend):
        try:
            meeting = open_meeting(at, time.monotonic() + TIME_FOR_MEETING)
            if backend.spans_hosts and would_lose_secret(own_address()):
                raise RuntimeError(f"grow: {SECRET_WOULD_BE_LOST}")
            new_ranks = read_announcements(meeting).items()
            fit = {token: new for token, new in new_ranks if not refuses(meeting, token, new)}
            is_remote = any(new.host != host_id() for new in fit.values())
            tokens = invite(meeting, [*fit], backend.spans_hosts or is_remote)
        except (OSError, RuntimeError, ValueError) as error:
            failure = error
    # 2. All running ranks learn the tokens, and the name of the agreement by which they make the group.
    text, agreement, tokens = broadcast_value((failure_text(failure), secrets.token_hex(8), tokens), 0, old)
    check_failures("grow", failure, [text], old)
    return _admit(old, meeting, agreement, tokens, timeout, is_remote) if tokens else old


def _has_failed_too_often(backend: Any) -> bool:
    """Whether the group admits no more ranks. The registers of several hosts have room for any number of failures."""
    return not backend.spans_hosts and made_group(backend.options.group_name).failed_grows >= _MOST_FAILURES


def _admit(
    old: dist.ProcessGroup,
    meeting: dist.Store | None,
    agreement: str,
    tokens: dict[str, str],
    limit: float,
    is_remote: bool,
) -> dist.ProcessGroup:
    """Make the group of the running ranks and the new ranks. Return it, or the old group if that fails.

    Args:
        old: the group of the running ranks.
        meeting: None on all ranks but 0.
        agreement: the name of the agreement.
        tokens: of the new ranks, in the order of their numbers, with the address at which each one listens.
        limit: seconds for making the group.
        is_remote: on rank 0, whether some of the new ranks are on other hosts.
    """
    backend = repairable_backend(old, "grow")
    rank, size, name = backend.rank(), backend.size(), next_name(backend.options.group_name)
    old_made_group = made_group(backend.options.group_name)
    prefix = store_prefix(old_made_group.attempt, agreement, 0)

    def publish_admissions(address: str) -> None:  # on rank 0, which serves the store of the new group
        assert meeting is not None
        secret = secret_of_group(meeting, True)
        for number, token in enumerate(tokens):
            admission = Admission(
                store=address,
                prefix=prefix,
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

    addresses = [*tokens.values()]
    attempt = RepairAttempt(backend, name, limit, agreement, addresses, is_remote, serving=publish_admissions)
    old_made_group.undecided_grow = agreement  # remains if run() raises: shrink() prevents that group
    if not attempt.run(make_together(rank, 0, tuple(range(size)))):
        old_made_group.undecided_grow = ""
        old_made_group.failed_grows += 1
        if meeting:
            with contextlib.suppress(RuntimeError):  # the store of the meeting may have ended
                meeting.set(f"failed/{prefix}", "")
            if _has_failed_too_often(backend):
                print_notice(f"new ranks have failed {_MOST_FAILURES} times to join; this group admits no more")
        return old  # the new ranks announce themselves again
    if rank == 0:
        attempt.store.set(_OUTCOME, MADE)
        if old_made_group.key and not made_group(name).key:
            print_notice(f"the new ranks are on another host, and the ranks are no longer authenticated; {REMEDY}")
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
    meeting = open_meeting(at, deadline)
    pause = _FIRST_PAUSE
    while True:
        admission = wait_for_admission(meeting, deadline)
        if admission is None:
            continue
        limit = min(admission.limit + _TIME_FOR_OUTCOME, max(deadline - time.monotonic(), 0.1))
        try:  # on a thread, which is left behind if the process of the store is stopped and no answer comes
            make_group_and_store = functools.partial(_make_group, admission)
            check = functools.partial(_check_not_failed, meeting, admission.prefix)
            backend, store = call_in_thread(make_group_and_store, limit, lambda made: made[0].abort(), check)
        except (OSError, RuntimeError) as error:  # also CommError: a rank has failed, and the others go on without us
            if time.monotonic() > deadline:
                raise TimeoutError(f"join: no group within {timeout:g} s: {error}") from error
            # A failed attempt costs the running ranks time: the timeout of grow(), if they cannot reach this rank.
            time.sleep(min(pause, max(deadline - time.monotonic(), 0)))
            pause = min(2 * pause, _LONGEST_PAUSE)
            continue
        backend.set_timeout(timedelta(seconds=admission.timeout))
        return install_default_group(backend, store, admission.name, admission.kind)


def _check_not_failed(meeting: dist.Store, prefix: str) -> None:
    """Raise RuntimeError if the running ranks have gone on without the group whose keys have this prefix."""
    has_failed = False
    with contextlib.suppress(RuntimeError):  # the store of the meeting may end before the group is made
        has_failed = meeting.check([f"failed/{prefix}"])
    if has_failed:
        raise RuntimeError("the running ranks have gone on without the new ranks")


def _make_group(admission: Admission) -> tuple[Any, dist.Store]:
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


def _given_options(options: BackendOptions | None) -> dict[str, Any]:
    """Return the arguments of BackendOptions that are given; ``one_shot_bytes=0`` is one of them."""
    if options is None:
        return {}
    others = {name: getattr(options, name) for name in ("slot_bytes", "one_shot_bytes", "transport")}
    return {name: value for name, value in {**options.algorithms, **others}.items() if value not in ("", None)}
