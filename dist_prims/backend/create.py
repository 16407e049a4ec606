"""Creation of a group of the backend "dist_prims" on one of its ranks, and what is known about the groups of a process.

``torch.distributed`` calls :func:`make_for_torch` for a new group; repairs, and C++ for the children of a group, call
:func:`make_group`. A *group* is here the backend object of a ``ProcessGroup`` of torch. The steps of its creation are
numbered in :func:`_make_group`: all ranks do them in the same order, and each step lets all ranks raise if one fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..backend_name import NAME
from ..collectives.group_hosts import remember_hosts
from ..collectives.proof_before_use import require_proof
from ..errors import PeerDiedError
from ..rendezvous.group_secret import address_of_store, announce_missing_secret, secret_of_group
from ..rendezvous.handshake import HOSTS, handshake
from ..rendezvous.hosts import host_id, network_number
from ..rendezvous.network import ports
from ..rendezvous.rank_values import timeout_while_made, values_of_ranks
from ..rendezvous.secret import Secret
from ..schedules import Schedule
from ..torch_compat import backend_of, default_group, device_types, nccl_options
from ..tracing import clock
from ..tracing.session import begin_trace_of_environment
from . import link_costs, mpi_library, quorum_ranks, tcp_endpoint, transport_selection, ucx_library
from .dump_flight_record import dump_file
from .extension import extension
from .group_setup import GroupSetup, MadeGroup
from .multi_host import MultiHostSchedules
from .options import BackendOptions, keep_options, slot_bytes_of
from .origin import GroupRequest, Origin, Repairs, Trait
from .pins import pin_schedules
from .tuning import tuned

__all__: list[str] = []

_CPU = torch.device("cpu")
_EXIT_TIME = 0.5  # seconds from the end of a connection to the end of its process


_groups: weakref.WeakSet[MadeGroup] = weakref.WeakSet()  # the groups of this process, as long as their backends exist
_lock = threading.Lock()  # of _groups: a repair makes a group on a thread of its own


def made_group(name: str) -> MadeGroup:
    """Return the group of this name, which must exist in this process.

    There may be several for a moment: a repair tries again under the name of an attempt that has not ended, and torch
    makes a backend for each kind of device and keeps the first one. Of the existing ones the latest request counts.
    """
    if made := _latest_group(name):
        return made
    raise KeyError(name)


def _latest_group(name: str) -> MadeGroup | None:
    with _lock:
        groups_of_name = [made for made in _groups if made.request.name == name]
    return max(groups_of_name, key=lambda made: made.request.order, default=None)


def find_made_group(group: dist.ProcessGroup) -> MadeGroup | None:
    """Return what is known about a group of torch if it has this backend, else None.

    The name is asked of the backend, because torch's ``shrink_group`` gives the group another name.
    """
    if _CPU.type not in device_types(group):
        return None
    options = getattr(backend_of(group, _CPU), "options", None)
    return _latest_group(getattr(options, "group_name", ""))


def make_for_torch(options: Any, given: Any, repairs: Repairs) -> Any:
    """Create the backend of a group for torch.

    Args:
        options: torch's description of the group: store, name, rank, size, timeout, global ranks.
        given: the ``pg_options`` of the caller.
        repairs: functions that torch's own repairs of the group need.
    """
    world = find_made_group(default_group()) if dist.is_initialized() else None
    request = GroupRequest(
        store=options.store,
        name=str(options.group_id),
        rank=options.group_rank,
        size=options.group_size,
        timeout=timedelta(seconds=options.timeout.total_seconds()),
        ranks=list(options.global_ranks_in_group),
        given=given if isinstance(given, BackendOptions) else None,
        origin=Origin.LAUNCHED,
        repairs=repairs,
        inherited=world.request.traits & Trait.SEVERAL_LAUNCHERS if world else Trait.NONE,
    )
    if getattr(options, "enable_reconfigure", False):  # since torch 2.15
        return _make_without_members(request)
    return make_group(request)


def _make_without_members(request: GroupRequest) -> Any:
    """Create the backend of a group that has no members before torch's first ``reconfigure`` of it.

    Until then the backend is a group of this rank alone.
    """
    ranks = [request.ranks[request.rank] if request.ranks else request.rank]
    alone = dataclasses.replace(request, store=dist.HashStore(), rank=0, size=1, ranks=ranks)
    backend = make_group(alone, ended=list)
    backend.await_members(request.rank, request.size)
    return backend


def make_group(request: GroupRequest, ended: Callable[[], list[int]] | None = None) -> Any:
    """Create the backend of a group, on each of its ranks.

    ``ended`` returns the ranks of the new group whose processes have ended. By default the default group is asked,
    which watches all processes of this host.
    """
    monitor = _DeathMonitor(request.rank, ended or _ended_by_default_group(request))
    try:
        return _make_group(request, monitor)
    except dist.DistError:  # the store ends with the process of its rank
        monitor.wait_and_raise()
        raise


def _make_group(request: GroupRequest, monitor: _DeathMonitor) -> Any:
    # 1. Settings: a wrong one raises before anything is sent.
    begin_trace_of_environment()
    options = keep_options(request.name, request.given)
    slot_bytes = slot_bytes_of(options)
    ports()  # raises for a wrong DIST_PRIMS_PORTS
    # 2. The handshake: from here on only the ranks of this attempt use the store.
    rank, size, ranks = request.rank, request.size, request.all_ranks
    store, attempt, hosts, secret = _handshake(request, monitor)
    temporary = _TemporaryKeys(store, [HOSTS] if rank == 0 and size > 1 else [])
    if Trait.LISTED in request.traits:
        _compare_ranks(temporary, rank, ranks)
    # 3. What C++ reads of the group.
    check = functools.partial(require_proof, rank=rank)  # of the schedules that are not part of the package
    one_shot = options.one_shot_bytes
    setup = GroupSetup(
        made=MadeGroup(request, hosts, attempt, secret.key("registers", attempt) if secret else b""),
        store=store,
        make=make_group,
        multi_host=None,
        accelerator=_nccl(store, rank, size, request.timeout),
        slot_bytes=slot_bytes,
        one_shot_bytes=tuned(size, warn=ranks[rank] == 0) if one_shot is None else one_shot,
        network=0,
        dump=dump_file(request.name, rank),
    )
    if len(set(hosts)) > 1:
        key = secret.key("connections", attempt).hex() if secret else ""
        _connect_hosts(setup, temporary, options.transport, key, check)
    # 4. The backend. Its ranks attach to the shared memory of their host, connect to other hosts, and agree.
    backend = extension().PrimsBackend(
        store=store, rank=rank, size=size, timeout=request.timeout, setup=setup, ended=monitor.first_dead
    )
    temporary.delete()
    pin_schedules(backend, rank, size, options, setup.multi_host, check)
    with _lock:
        _groups.add(setup.made)
    return backend


def _connect_hosts(setup: GroupSetup, store: Any, transport: str, key: str, check: Callable[[Schedule], None]) -> None:
    """Set in ``setup`` what a group needs only if it spans hosts: schedules, the transport, the registers for repairs.

    Args:
        setup: of the new group.
        store: for values that are deleted when the group has been made.
        transport: the transport that the caller requests, or an empty string.
        key: proves that a connection is from a rank of the group; empty without a secret.
        check: raises for an incorrect schedule.
    """
    made, request = setup.made, setup.made.request
    rank, hosts = request.rank, made.hosts
    clock.register(setup.store, rank)
    # 1. Schedules, by the costs of the links. If rank 0 does not know the costs, C++ measures them later.
    costs = link_costs.of_rank_0(store, rank, hosts, warn=setup.ranks[0] == 0)
    setup.network = 0 if costs else network_number()
    setup.multi_host = MultiHostSchedules(hosts, rank, costs or link_costs.uncalibrated(hosts), check)
    remember_hosts(request.name, setup.multi_host.order)
    # 2. The transport, the same on all ranks.
    requested = transport or os.environ.get("DIST_PRIMS_TRANSPORT", "")
    if Trait.WITHOUT_MPI in request.traits and requested in ("", "mpi"):
        requested = "tcp"
    selected = transport_selection.select(store, rank, setup.ranks, requested)
    address = tcp_endpoint.common_address(store, rank, request.size, address_of_store(request.store))
    if selected == "mpi":
        setup.mpi = mpi_library.make(setup.ranks, request.timeout)
    else:
        setup.tcp = tcp_endpoint.make(store, rank, hosts, address, key)
        setup.ucx = ucx_library.make(store, rank, request.size, address) if selected == "ucx" else None
    # 3. Where each rank listens for repairs.
    made.addresses, made.registers = quorum_ranks.publish(store, rank, hosts, address, made.attempt, made.key)


class _TemporaryKeys:
    """The store of a new group, for values that no rank reads after the group's first agreement.

    :meth:`delete` deletes the keys that this rank has set, and ``keys``, which the handshake has set. The process that
    serves the store would otherwise keep the keys of all groups that are ever made.
    """

    def __init__(self, store: Any, keys: list[str]) -> None:
        self._store, self._keys = store, keys

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)
        self._keys.append(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def delete(self) -> None:
        with contextlib.suppress(RuntimeError):  # a store of the user may be unable to delete: the keys stay
            for key in self._keys:
                self._store.delete_key(key)


def _ended_by_default_group(request: GroupRequest) -> Callable[[], list[int]]:
    """Return a function that returns the ranks of a new group that have ended, as the default group has seen.

    Where the new group is the default group, or the default group has another backend or other ranks, no death is
    detected before the ranks have attached to the shared memory.
    """
    ranks = [] if Trait.NO_GLOBAL_RANKS in request.traits else [*request.ranks]
    default = default_group() if ranks and dist.is_initialized() else None
    if default is None or _CPU.type not in device_types(default):
        return list
    ended = getattr(backend_of(default, _CPU), "ended", list)
    return lambda: [ranks.index(rank) for rank in ended() if rank in ranks]


class _DeathMonitor:
    """Detects that a rank has died while its group is created. ``rank`` is this rank, for errors."""

    def __init__(self, rank: int, ended: Callable[[], list[int]]) -> None:
        self._rank, self._ended = rank, ended

    def first_dead(self) -> int:
        """Return a rank of the new group whose process has ended; -1 if there is none. C++ calls it too."""
        return next(iter(self._ended()), -1)

    def check(self) -> None:
        """Raise PeerDiedError if a process has ended."""
        if (culprit := self.first_dead()) >= 0:
            raise PeerDiedError(
                f"rank {self._rank}: rank {culprit} has died while the group was made; see the last output of that "
                "rank, and start the group again"
            )

    def wait_and_raise(self) -> None:
        """Raise PeerDiedError if a process ends soon: its connections end a little before the process."""
        deadline = time.monotonic() + _EXIT_TIME
        while time.monotonic() < deadline:
            self.check()
            time.sleep(0.01)


class _Handshake(NamedTuple):
    """What a rank knows after the handshake."""

    store: Any  # that only the ranks of this attempt to make the group use
    attempt: str  # the name of this attempt, which is random
    hosts: list[str]  # by rank
    secret: Secret | None  # of the ranks; None if they have none, or the group has one rank


def _handshake(request: GroupRequest, monitor: _DeathMonitor) -> _Handshake:
    """Meet the other ranks in the store of the request (:func:`dist_prims.rendezvous.handshake.handshake`)."""
    rank, size, timeout = request.rank, request.size, request.timeout
    store = dist.PrefixStore(NAME, request.store)
    store.set_timeout(timeout)
    if size == 1:
        return _Handshake(store, secrets.token_hex(8), [host_id()], None)
    secret = secret_of_group(request.store, Trait.SEVERAL_LAUNCHERS in request.traits)
    if secret is None and rank == 0:
        announce_missing_secret(request.store)
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        attempt, hosts = handshake(store, rank, size, deadline, secret, request.common_name, monitor.check)
    except TimeoutError as error:
        raise timeout_while_made(rank, str(error)) from error
    own_store = dist.PrefixStore(attempt, store)
    signed = own_store if secret is None else extension().SignedStore(own_store, secret.key("store", attempt))
    return _Handshake(signed, attempt, hosts, secret)


def _compare_ranks(store: Any, rank: int, ranks: list[int]) -> None:
    """Raise ValueError on all ranks if two were given different lists of ranks."""
    store.set(f"ranks/{rank}", json.dumps(ranks))
    for other, text in enumerate(values_of_ranks(store, rank, "ranks", len(ranks))):
        if (its_ranks := json.loads(text)) != ranks:
            raise ValueError(
                f"split_group: the ranks disagree: rank {rank} of the new group was given the global ranks {ranks}, "
                f"and rank {other} {its_ranks}; pass the same list, in the same order, on each of them"
            )


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return the backend for CUDA tensors; None without CUDA."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return None
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, nccl_options(timeout))
