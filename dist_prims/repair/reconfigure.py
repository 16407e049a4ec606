"""``reconfigure`` of torch 2.15 and later: the program gives a group other members, and the group object remains.

torch 2.15 has only private functions for it, such as ``torch.distributed._reconfigure``. A program uses them so:

1. Each future member gets its *handle*, a string that names its process, and the program sends it to all members.
2. Each member calls reconfigure with the handles of all members and a uuid, the number of this call. The ranks have the
   order of the handles.
3. The calls return when the group is made. A member is a process of the old group, of another group, or a new process
   that has made a group with ``enable_reconfigure=True``. Such a group has no members until its first reconfigure.

The survivors need no agreement (:mod:`.survivors`), because the program chooses the members. The group is made by the
same function as after a repair. A handle contains the address of a store that its process serves, and the members meet
at the store of rank 0. The store of the job, which may have ended with its process, is not needed.

The old group ends when reconfigure begins: a rank that waits in a call of the old group gets an error, and can then
call reconfigure as well.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .._output import print_notice
from ..backend.create import find_made_group, made_group, make_group
from ..backend.origin import GroupRequest, Origin, Trait
from ..backend_name import NAME
from ..errors import CommError, CommTimeoutError, PeerDiedError
from ..rendezvous.deadline import call_in_thread
from ..rendezvous.group_secret import would_lose_secret
from ..rendezvous.network import own_address
from ..rendezvous.secret import REMEDY, remembered
from ..rendezvous.served import open_store, served_store
from ..torch_compat import count_groups_from, default_group, group_count, known_groups, replace_members
from .process_probe import ProcessProbe

__all__: list[str] = []

_PURPOSE = "reconfigure"  # of the codes in handles, and of the keys in the store
_TIME_FOR_REASON = 2.5  # seconds after the deadline for an error that names the late ranks; make_group() takes 1.5 s
_FIRST_PROBE = 0.3  # seconds until the members are probed: usually the group is made by then


@dataclass(frozen=True, order=True)
class _Handle:
    """Names a process to the other members. Handles without an order are sorted: by rank, then by token."""

    rank: int  # of the process in its first group
    token: str  # random
    code: str  # shows that the process knows the secret of its launcher; empty if it has no secret
    world: str  # the attempt that has made its default group; empty if it has no default group of this backend
    global_rank: int  # of the process in its default group
    address: str  # of the store that the process serves

    def text(self) -> str:
        return f"{NAME}:{self.rank}:{self.token}:{self.code}:{self.world}:{self.global_rank}:{self.address}"

    @classmethod
    def parse(cls, text: str) -> _Handle:
        match = re.fullmatch(rf"{NAME}:(\d+):([0-9a-f]{{16}}):([0-9a-f]*):(\w*):(\d+):(.+:\d+)", text)
        if not match:
            raise ValueError(
                f"reconfigure: {text!r} is no handle of this backend; pass what get_reconfigure_handle has returned on "
                "each member"
            )
        rank, token, code, world, global_rank, address = match.groups()
        return cls(int(rank), token, code, world, int(global_rank), address)


def reconfigure_handle(rank: int) -> str:
    """Return a new handle of this process; called by C++, once for a group object. ``rank``: in its first group."""
    token, secret = secrets.token_hex(8), remembered()
    code = secret.code(_PURPOSE, token) if secret else ""
    world, global_rank = _world()
    _, address = served_store(own_address())
    return _Handle(rank, token, code, world, global_rank, address).text()


def _world() -> tuple[str, int]:
    """The fields ``world`` and ``global_rank`` of the handle of this process."""
    if dist.is_initialized() and (world := find_made_group(default_group())):
        return world.attempt, default_group().rank()
    return "", 0


def reconfigured_backend(
    backend: Any, uuid: int, own: str, handles: Sequence[str], is_ordered: bool, timeout: timedelta
) -> Any:
    """Make the group of these members, and return its backend. C++ calls this, and puts the result in the place of
    ``backend``.

    Args:
        backend: of the old group.
        uuid: the number of this call, the same on all members.
        own: the handle of this process.
        handles: of all members.
        is_ordered: whether the handles have the order of the new ranks.
        timeout: of this call.
    """
    # 1. The members and their order. Nothing has been sent yet.
    rank, members = _members(own, handles, is_ordered)
    one_launcher = _have_one_launcher(members)
    if not one_launcher and would_lose_secret(own_address()):
        raise RuntimeError(
            "reconfigure: a member does not have the secret that the launcher of this process has given to its ranks, "
            f"and the group would have none; {REMEDY}"
        )
    # 2. The old group ends, unless an earlier call has had this uuid: then use_uuid() raises.
    backend.use_uuid(uuid)
    backend.abort()  # the other ranks learn that this one makes no further calls in the old group
    # 3. What the old group was for torch: the default group, a group of known global ranks, or neither.
    old = made_group(backend.options.group_name)
    group = next((known for known in known_groups() if find_made_group(known) is old), None)
    world, own_global_rank = _world()
    global_ranks: list[int] = []  # of the members; empty for the default group, or if they are unknown
    is_default = dist.is_initialized() and group is default_group()
    if not is_default and world and all(member.world == world for member in members):
        global_ranks = [member.global_rank for member in members]
    traits = Trait.NONE
    if not one_launcher:
        traits |= Trait.SEVERAL_LAUNCHERS
    if not (is_default or global_ranks):
        traits |= Trait.NO_GLOBAL_RANKS
    # 4. The new group is made.
    new_backend, store, group_counts = _make_group(old.request, uuid, rank, members, timeout, global_ranks, traits)
    new_backend.set_timeout(backend.options._timeout)
    if rank == 0 and old.key and not made_group(old.request.name).key:
        print_notice(f"reconfigure: the members are no longer authenticated; {REMEDY}")
    # 5. torch's tables name the new members. torch names new groups by their number, which must be the same on all.
    if is_default:
        global_ranks = list(range(len(members)))
        count_groups_from(max(group_counts))
    if group:  # torch does not list groups of ProcessGroup.split_group
        new_ranks = {global_rank: new_rank for new_rank, global_rank in enumerate(global_ranks)}
        replace_members(group, store, new_ranks or {own_global_rank: rank})
    return new_backend


def _members(own: str, handles: Sequence[str], is_ordered: bool) -> tuple[int, list[_Handle]]:
    """Return the new rank of this process, and the handles of the members by new rank."""
    members = [_Handle.parse(text) for text in handles]
    if len(set(members)) < len(members):
        raise ValueError("reconfigure: a handle is listed twice; list each member once")
    if not is_ordered:
        members.sort()
    if own not in handles:
        raise ValueError(
            "reconfigure: the handle of this process is not among those of the members; only members call reconfigure, "
            "and a group object has one handle as long as it lives"
        )
    return members.index(_Handle.parse(own)), members


def _have_one_launcher(members: Sequence[_Handle]) -> bool:
    """Whether all members know the secret of the launcher of this process. All members get the same answer."""
    secret = remembered()
    return secret is not None and all(secret.is_code(member.code, _PURPOSE, member.token) for member in members)


def _make_group(
    old: GroupRequest,
    uuid: int,
    rank: int,
    members: Sequence[_Handle],
    timeout: timedelta,
    global_ranks: list[int],
    traits: Trait,
) -> tuple[Any, dist.Store, list[int]]:
    """Make the group. Return its backend, a store of its members, and the number of groups that each member has made.

    The group is made on a thread of its own, which is left behind if no answer comes because the process of the store
    is stopped. The parameters: see :func:`reconfigured_backend`; ``rank`` is the new rank of this process.
    """
    size, limit = len(members), timeout.total_seconds()
    deadline = time.monotonic() + limit
    probe = ProcessProbe([member.address for member in members], _FIRST_PROBE)
    guard, has_store = threading.Lock(), threading.Event()

    def ended() -> list[int]:
        with guard:  # both threads call it
            return sorted(probe.ended([other for other in range(size) if other != rank]))

    def check() -> None:
        # TCPStore tries for seconds to connect to a process that has ended.
        if not has_store.is_set() and 0 in ended():
            raise ConnectionRefusedError

    def make_new_group() -> tuple[Any, dist.Store, list[int]]:
        store = dist.PrefixStore(f"{_PURPOSE}/{uuid}", open_store(members[0].address, size, limit))
        has_store.set()
        _compare_members(store, members)
        store.set(f"groups/{rank}", str(group_count()))
        request = dataclasses.replace(
            old,
            store=store,
            rank=rank,
            size=size,
            timeout=timedelta(seconds=max(0.1, deadline - time.monotonic())),
            ranks=global_ranks,
            origin=Origin.RECONFIGURED,
            inherited=traits,
        )
        backend = make_group(request, ended)
        return backend, store, [*map(int, store.multi_get([f"groups/{other}" for other in range(size)]))]

    try:
        return call_in_thread(make_new_group, limit + _TIME_FOR_REASON, lambda made: made[0].abort(), check)
    except ConnectionRefusedError:
        raise PeerDiedError(
            f"rank {rank}: reconfigure: the process of new rank 0 has ended; leave its handle out, and call "
            "reconfigure again with another uuid"
        ) from None
    except (OSError, RuntimeError) as error:
        if isinstance(error, CommError) and not isinstance(error, CommTimeoutError):
            raise
        raise CommError(
            f"rank {rank}: reconfigure: the group could not be made within {limit:g} s: {error}; find out which "
            "processes are left, and call reconfigure again with another uuid"
        ) from error


def _compare_members(store: dist.Store, members: Sequence[_Handle]) -> None:
    """Raise ValueError if another member has passed other handles, or the same handles in another order."""
    digest = hashlib.sha256("\n".join(member.text() for member in members).encode()).hexdigest()
    if store.compare_set("members", "", digest).decode() != digest:
        raise ValueError(
            "reconfigure: another member has passed other handles with this uuid, or the same in another order; pass "
            "the same list on all members"
        )
