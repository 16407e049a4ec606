"""``reconfigure`` of torch 2.15 and later: the program gives a group other members, and the group object remains.

torch 2.15 has no public function for it yet, but ``torch.distributed._reconfigure`` and two others:

1. Each future member gets its *handle*, a string, and the program sends it to the other members.
2. Each member calls reconfigure with the handles of all members and a uuid, the number of this call. The ranks have the
   order of the handles.
3. The calls return when the group is made. A member is a process of the old group, of another group, or a new process
   that has made a group with ``enable_reconfigure=True``. Such a group has no members until its first reconfigure.

The survivors need no agreement (:mod:`.survivors`), because the program chooses the members. The group is made by the
same function as after a repair. A handle contains the address of a store that its process serves, and the members meet
at the store of the first handle. The store of the job, which may have ended with its process, is not needed.

The old group ends when reconfigure begins: a rank that waits in one of its calls gets an error, and can then call
reconfigure as well.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..backend.create import find_made_group, made_group, make_group
from ..backend.origin import GroupRequest, Origin, Trait
from ..backend_name import NAME
from ..errors import CommError, PeerDiedError
from ..rendezvous.deadline import call_in_thread
from ..rendezvous.group_secret import would_lose_secret
from ..rendezvous.handshake import warn
from ..rendezvous.network import own_address
from ..rendezvous.secret import REMEDY, remembered
from ..rendezvous.served import open_store, served_store
from ..torch_compat import count_groups_from, default_group, group_count, known_groups, replace_members
from .process_probe import ProcessProbe

__all__: list[str] = []

_PURPOSE = "reconfigure"  # of the codes in handles
_TIME_FOR_REASON = 0.5  # seconds after the deadline for an error that names the late ranks
_FIRST_PROBE = 0.3  # seconds: usually the group is made by then


@dataclass(frozen=True, order=True)
class _Handle:
    """Names a process to the other members. Handles in no order are sorted: by rank, then by the random token."""

    rank: int  # in its first group
    token: str
    code: str  # shows that the process knows the secret of its launcher; empty without one
    world: str  # the attempt that has made the default group of the process; empty without one of this backend
    global_rank: int  # in that group
    address: str  # of the store that the process serves

    def text(self) -> str:
        return f"{NAME}:{self.rank}:{self.token}:{self.code}:{self.world}:{self.global_rank}:{self.address}"

    @classmethod
    def parse(cls, text: str) -> _Handle:
        found = re.fullmatch(rf"{NAME}:(\d+):([0-9a-f]{{16}}):([0-9a-f]*):(\w*):(\d+):(.+:\d+)", text)
        if not found:
            raise ValueError(
                f"reconfigure: {text!r} is no handle of this backend; pass what get_reconfigure_handle has returned on "
                "each member"
            )
        rank, token, code, world, global_rank, address = found.groups()
        return cls(int(rank), token, code, world, int(global_rank), address)


def reconfigure_handle(rank: int) -> str:
    """Return a new handle of this process; called by C++, once for a group object."""
    token, secret = secrets.token_hex(8), remembered()
    _, address = served_store(own_address())
    return _Handle(rank, token, secret.code(_PURPOSE, token) if secret else "", *_world(), address).text()


def _world() -> tuple[str, int]:
    """The attempt that has made the default group, and the rank of this process in it."""
    if dist.is_initialized() and (made := find_made_group(default_group())):
        return made.attempt, default_group().rank()
    return "", 0


def reconfigured_backend(
    backend: Any, uuid: int, own: str, handles: Sequence[str], is_ordered: bool, timeout: timedelta
) -> Any:
    """Return the backend of the group of these members; called by C++, which puts it in the place of ``backend``.

    ``own`` is the handle of this process, and ``timeout`` limits the call.
    """
    # 1. The members and their order. Nothing has been sent yet.
    rank, members = _members(own, handles, is_ordered)
    one_launcher = _have_one_launcher(members)
    _require_secret(members, one_launcher)
    # 2. The old group ends.
    backend.use_uuid(uuid)
    backend.abort()  # the other ranks learn that this one makes no further calls in the old group
    # 3. What the old group was for torch: the default group, a group of known global ranks, or neither.
    old = made_group(backend.options.group_name)
    group = next((each for each in known_groups() if find_made_group(each) is old), None)
    world, own_rank = _world()
    ranks: list[int] = []  # the global ranks; empty for the default group, or if they are unknown
    is_default = dist.is_initialized() and group is default_group()
    if not is_default and world and all(each.world == world for each in members):
        ranks = [each.global_rank for each in members]
    traits = Trait.NONE
    if not one_launcher:
        traits |= Trait.SEVERAL_LAUNCHERS
    if not (is_default or ranks):
        traits |= Trait.NO_GLOBAL_RANKS
    # 4. The new group meets and is made.
    made, store, groups = _make(old.request, uuid, rank, members, timeout, ranks, traits)
    made.set_timeout(backend.options._timeout)
    if rank == 0 and old.key and not made_group(old.request.name).key:
        warn(f"reconfigure: the members are no longer authenticated; {REMEDY}")
    # 5. torch's tables name the new members.
    if is_default:
        ranks = list(range(len(members)))
        count_groups_from(groups)
    if group:  # torch does not list groups of ProcessGroup.split_group
        replace_members(group, store, {each: place for place, each in enumerate(ranks)} or {own_rank: rank})
    return made


def _members(own: str, handles: Sequence[str], is_ordered: bool) -> tuple[int, list[_Handle]]:
    """Return the new rank of this process, and the members by rank."""
    members = [_Handle.parse(each) for each in handles]
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
    """Whether all members know the secret of the launcher of this process; every member finds the same."""
    secret = remembered()
    return secret is not None and all(secret.is_code(each.code, _PURPOSE, each.token) for each in members)


def _require_secret(members: Sequence[_Handle], one_launcher: bool) -> None:
    """Raise RuntimeError if this process has a secret that other members do not know, and the group would have none."""
    if not one_launcher and would_lose_secret(own_address()):
        raise RuntimeError(
            "reconfigure: a member does not have the secret that the launcher of this process has given to its ranks, "
            f"and the group would have none; {REMEDY}"
        )


def _make(
    old: GroupRequest,
    uuid: int,
    rank: int,
    members: Sequence[_Handle],
    timeout: timedelta,
    ranks: list[int],
    traits: Trait,
) -> tuple[Any, dist.Store, int]:
    """Make the group; return its backend, a store that its members share, and the number of groups that the member with
    the most has made.

    A store whose process is stopped answers nothing: a thread waits for it, and can be left.
    """
    size, limit = len(members), timeout.total_seconds()
    deadline = time.monotonic() + limit
    probe = ProcessProbe([each.address for each in members], _FIRST_PROBE)

    def ended() -> list[int]:
        return sorted(probe.ended([each for each in range(size) if each != rank]))

    def make() -> tuple[Any, dist.Store, int]:
        store = dist.PrefixStore(f"{_PURPOSE}/{uuid}", open_store(members[0].address, size, limit))
        _compare(store, members)
        store.set(f"groups/{rank}", str(group_count()))
        left = timedelta(seconds=max(0.1, deadline - time.monotonic()))
        new = dataclasses.replace(
            old,
            store=store,
            rank=rank,
            size=size,
            timeout=left,
            ranks=ranks,
            origin=Origin.RECONFIGURED,
            inherited=traits,
        )
        made = make_group(new, ended)
        groups = store.multi_get([f"groups/{each}" for each in range(size)])
        return made, store, max(map(int, groups))

    try:
        return call_in_thread(make, limit + _TIME_FOR_REASON, discard=lambda late: late[0].abort())
    except ConnectionRefusedError:
        raise PeerDiedError(
            f"rank {rank}: reconfigure: the process of new rank 0 has ended; leave its handle out, and call "
            "reconfigure again with another uuid"
        ) from None
    except (OSError, RuntimeError) as error:
        if isinstance(error, CommError):
            raise
        raise CommError(
            f"rank {rank}: reconfigure: the group could not be made within {limit:g} s: {error}; find out which "
            "processes are left, and call reconfigure again with another uuid"
        ) from error


def _compare(store: dist.Store, members: Sequence[_Handle]) -> None:
    """Raise ValueError if another member has come with other handles, or with the same in another order."""
    digest = hashlib.sha256("\n".join(each.text() for each in members).encode()).hexdigest()
    if store.compare_set("members", "", digest).decode() != digest:
        raise ValueError(
            "reconfigure: another member has passed other handles with this uuid, or the same in another order; pass "
            "the same list on all members"
        )
