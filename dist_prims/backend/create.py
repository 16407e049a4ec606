"""Creation of a group of the backend "dist_prims" on one of its ranks, and what is known about the groups of a process.

``torch.distributed`` calls :func:`make_for_torch` for a new group; repairs, and C++ for the children of a group, call
:func:`make_group`. A *group* is here the backend object of a ``ProcessGroup`` of torch. The steps of its creation are
numbered in :func:`_make_group`: all ranks do them in the same order, and each step lets all ranks raise if one fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..backend_name import NAME
from ..collectives.group_hosts import remember_hosts
from ..collectives.proof_before_use import require_proof
from ..rendezvous.group_secret import address_of_store, announce_missing_secret, secret_of_group
from ..rendezvous.handshake import HOSTS, handshake
from ..rendezvous.hosts import host_id, network_number
from ..rendezvous.network import ports
from ..rendezvous.rank_values import make_and_publish, timeout_while_made, values_at, values_of_ranks, wait_for_readers
from ..rendezvous.secret import Secret
from ..schedules import Schedule
from ..torch_compat import backend_of, default_group, device_types, nccl_options
from ..tracing import clock
from ..tracing.session import begin_trace_of_environment
from . import link_costs, mpi_library, quorum_ranks, tcp_endpoint, transport_selection, ucx_library
from .death_monitor import DeathMonitor, RemoteProcesses
from .dump_flight_record import dump_file
from .extension import extension
from .group_setup import GroupSetup, MadeGroup
from .multi_host import MultiHostSchedules
from .options import BackendOptions, keep_options, slot_bytes_of
from .origin import GroupRequest, Origin, Repairs, Trait
from .pins import pin_schedules
from .tuning import ONE_SHOT_BYTES, tuned

__all__: list[str] = []

_CPU = torch.device("cpu")

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
    which knows the processes of its ranks.
    """
    monitor = DeathMonitor(request.rank, ended or _ended_by_default_group(request))
    try:
        return _make_group(request, monitor)
    except dist.DistError:  # the store ends with the process of its rank
        monitor.wait_and_raise()
        raise


def _make_group(request: GroupRequest, monitor: DeathMonitor) -> Any:
    # 1. Settings: a wrong one raises before anything is sent.
    begin_trace_of_environment()
    options = keep_options(request.name, request.given)
    slot_bytes = slot_bytes_of(options)
    ports()  # raises for a wrong DIST_PRIMS_PORTS
    # 2. The handshake: from here on only the ranks of this attempt use the store.
    rank, size, ranks = request.rank, request.size, request.all_ranks
    requested = _requested_transport(request, options.transport)
    store, attempt, hosts, secret, common = _handshake(request, requested, monitor)
    temporary = _TemporaryKeys(store, [HOSTS] if rank == 0 and size > 1 else [], monitor)
    if Trait.LISTED in request.traits:
        _compare_ranks(temporary, rank, ranks)
    # 3. What C++ reads of the group.
    check = functools.partial(require_proof, rank=rank)  # of the schedules that are not part of the package
    if (one_shot := options.one_shot_bytes) is None:  # between hosts no all_reduce is of one shot
        one_shot = tuned(size, warn=ranks[rank] == 0) if len(set(hosts)) == 1 else ONE_SHOT_BYTES
    setup = GroupSetup(
        made=MadeGroup(request, hosts, attempt, secret.key("registers", attempt) if secret else b""),
        store=store,
        make=make_group,
        multi_host=None,
        nccl=_nccl(store, rank, size, request.timeout),
        slot_bytes=slot_bytes,
        one_shot_bytes=one_shot,
        network=0,
        dump=dump_file(request.name, rank),
    )
    if len(set(hosts)) > 1:
        if secret:
            common = common._replace(key=secret.key("connections", attempt).hex())
        _connect_hosts(setup, temporary, bool(requested), common, check)
    # 4. The backend. Its ranks attach to the shared memory of their host, connect to other hosts, and agree.
    backend = extension().PrimsBackend(
        store=store, rank=rank, size=size, timeout=request.timeout, setup=setup, ended=monitor.first_dead
    )
    temporary.delete()
    pin_schedules(backend, rank, size, options, setup.multi_host, check)
    with _lock:
        _groups.add(setup.made)
    return backend


class _Common(NamedTuple):
    """What rank 0 has decided for a group on several hosts, in the handshake."""

    costs: Mapping[str, Any] = {}  # of the links; empty if C++ measures them later
    transport: str = ""  # the one that rank 0 proposes
    family: str = ""  # of the addresses of all ranks: IPv4 or IPv6
    problem: str = ""  # why the ranks have no family in common
    key: str = ""  # by which connections prove that they are from a rank of the group
    address: str = ""  # at which this rank listens, which the rank adds itself


def _decide(request: GroupRequest, requested: str, has_secret: bool, hosts: list[str], descriptions: list[str]) -> str:
    """Decide on rank 0 what all ranks of a group have in common; ``descriptions``: of their addresses, by rank."""
    if len(set(hosts)) == 1:
        return ""
    family, problem = tcp_endpoint.choose_family(descriptions, address_of_store(request.store))
    return json.dumps(
        _Common(
            costs=link_costs.known(hosts, warn=request.all_ranks[0] == 0),
            transport=transport_selection.propose(request.all_ranks, requested),
            family=family,
            problem=problem,
            key="" if has_secret else secrets.token_hex(32),  # which every process that can read the store can read
        )
    )


def _requested_transport(request: GroupRequest, transport: str) -> str:
    """The transport that this rank requests; empty for none. ``transport``: the request of the caller."""
    requested = transport or os.environ.get("DIST_PRIMS_TRANSPORT", "")
    return "tcp" if Trait.WITHOUT_MPI in request.traits and requested in ("", "mpi") else requested


def _connect_hosts(
    setup: GroupSetup, store: Any, is_requested: bool, common: _Common, check: Callable[[Schedule], None]
) -> None:
    """Set in ``setup`` what a group needs only if it spans hosts: schedules, the transport, the registers for repairs.

    Args:
        setup: of the new group.
        store: for values that are deleted when the group has been made.
        is_requested: whether this rank requests a transport.
        common: what rank 0 has decided.
        check: raises for an incorrect schedule.
    """
    made, request = setup.made, setup.made.request
    rank, hosts = request.rank, made.hosts
    clock.register(setup.store, rank)
    if common.problem:
        wait_for_readers(store, rank, "problem", request.size)
        raise RuntimeError(f"rank {rank}: {common.problem}")
    # 1. Schedules, by the costs of the links. If rank 0 does not know the costs, C++ measures them later.
    setup.network = 0 if common.costs else network_number()
    setup.multi_host = MultiHostSchedules(hosts, rank, common.costs or link_costs.uncalibrated(hosts), check)
    remember_hosts(request.name, setup.multi_host.order)
    # 2. The transport, the same on all ranks.
    selected = transport_selection.select(store, rank, setup.ranks, common.transport, is_requested)
    address = common.address

    def listen_for_repairs() -> str:
        own, made.registers = quorum_ranks.listen_for_repairs(rank, hosts, address, made.attempt, made.key)
        return own

    # 3. Where each rank listens for repairs, and for messages of the other hosts.
    if selected == "mpi":
        setup.mpi = mpi_library.make(setup.ranks, request.timeout)
        _, made.addresses = make_and_publish(
            store, rank, request.size, "repair", lambda: (None, listen_for_repairs()), "cannot listen for repairs"
        )
    else:
        setup.tcp, made.addresses = tcp_endpoint.make(store, rank, hosts, address, listen_for_repairs, common.key)
        setup.ucx = ucx_library.make(store, rank, request.size, address) if selected == "ucx" else None


class _TemporaryKeys:
    """The store of a new group, for values that no rank reads after the group's first agreement.

    :meth:`delete` deletes the keys that this rank has set, and ``keys``, which the handshake has set. The process that
    serves the store would otherwise keep the keys of all groups that are ever made. A wait for a key ends with an error
    if ``monitor`` detects a death.
    """

    def __init__(self, store: Any, keys: list[str], monitor: DeathMonitor) -> None:
        self._store, self._keys, self._monitor = store, keys, monitor

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)
        self._keys.append(key)

    def get(self, key: str) -> Any:
        self._monitor.wait_for_keys(self._store, [key])
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> Any:
        self._monitor.wait_for_keys(self._store, keys)
        return self._store.multi_get(keys)

    def ended(self) -> list[int]:
        """Return the ranks of the group whose processes have ended."""
        return self._monitor.ended()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def delete(self) -> None:
        with contextlib.suppress(RuntimeError):  # a store of the user may be unable to delete: the keys stay
            for key in self._keys:
                self._store.delete_key(key)


def _ended_by_default_group(request: GroupRequest) -> Callable[[], list[int]]:
    """Return a function that returns the ranks of a new group that have ended, as the default group knows.

    Where the new group is the default group, or the default group has another backend or other ranks, no death is
    detected before the ranks have attached to the shared memory. Nor is a death on another host where MPI carries the
    messages: a firewall may then refuse the probes of a process that runs.
    """
    ranks = [] if Trait.NO_GLOBAL_RANKS in request.traits else [*request.ranks]
    default = default_group() if ranks and dist.is_initialized() else None
    if default is None or not (made := find_made_group(default)):
        return list
    backend = backend_of(default, _CPU)
    elsewhere: dict[int, str] = {}
    if getattr(backend, "transport", "") in ("tcp", "ucx"):
        here = made.hosts[ranks[request.rank]]
        elsewhere = {rank: made.addresses[rank] for rank in ranks if made.hosts[rank] != here}
    ended_here, processes = getattr(backend, "ended", list), RemoteProcesses(elsewhere)
    return lambda: [ranks.index(rank) for rank in [*ended_here(), *processes.ended()] if rank in ranks]


class _Handshake(NamedTuple):
    """The result of :func:`_handshake`, which adds store, secret and rank 0's decision to a ``Meeting``."""

    store: Any  # that only the ranks of this attempt to make the group use
    attempt: str  # the name of this attempt, which is random
    hosts: list[str]  # by rank
    secret: Secret | None  # of the ranks; None if they have none, or the group has one rank
    common: _Common


def _handshake(request: GroupRequest, requested: str, monitor: DeathMonitor) -> _Handshake:
    """Meet the other ranks in the store of the request (:func:`dist_prims.rendezvous.handshake.handshake`)."""
    rank, size, timeout = request.rank, request.size, request.timeout
    store = dist.PrefixStore(NAME, request.store)
    store.set_timeout(timeout)
    if size == 1:
        return _Handshake(store, secrets.token_hex(8), [host_id()], None, _Common())
    secret = secret_of_group(request.store, Trait.SEVERAL_LAUNCHERS in request.traits)
    if secret is None and rank == 0:
        announce_missing_secret(request.store)
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        description = tcp_endpoint.describe_addresses()
        attempt, hosts, decision = handshake(
            store,
            rank,
            size,
            deadline,
            secret,
            request.common_name,
            monitor.check,
            text=description,
            decide=functools.partial(_decide, request, requested, secret is not None),
        )
    except TimeoutError as error:
        raise timeout_while_made(rank, str(error)) from error
    own_store = dist.PrefixStore(attempt, store)
    signed = own_store if secret is None else extension().SignedStore(own_store, secret.key("store", attempt))
    common = _Common(*json.loads(decision)) if decision else _Common()
    if common.family:
        common = common._replace(address=tcp_endpoint.address_of_family(description, common.family))
    return _Handshake(signed, attempt, hosts, secret, common)


def _compare_ranks(store: Any, rank: int, ranks: list[int]) -> None:
    """Raise ValueError on all ranks if two were given different lists of ranks."""
    # 1. Digests of the lists: the lists of all ranks would have n^2 numbers.
    text = json.dumps(ranks)
    store.set(f"ranks/{rank}", hashlib.sha256(text.encode()).hexdigest())
    digests = values_of_ranks(store, rank, "ranks", len(ranks))
    if len(set(digests)) == 1:
        return
    # 2. Two lists that differ, for the error: of rank 0 and of the first rank with another list.
    unlike = next(other for other, digest in enumerate(digests) if digest != digests[0])
    if rank in (0, unlike):
        store.set(f"list of ranks/{rank}", text)
    other = unlike if digests[rank] == digests[0] else 0
    [its_ranks] = values_at(store, rank, {other: f"list of ranks/{other}"})
    wait_for_readers(store, rank, "ranks", len(ranks))
    raise ValueError(
        f"split_group: the ranks disagree: rank {rank} of the new group was given the global ranks {ranks}, "
        f"and rank {other} {its_ranks}; pass the same list, in the same order, on each of them"
    )


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return the backend for CUDA tensors; None without CUDA."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return None
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, nccl_options(timeout))
