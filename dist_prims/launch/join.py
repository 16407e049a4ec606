"""``init()``: one default group of all ranks that a launcher started, for every supported launcher.

``torch.distributed`` needs address, port, rank and size. Every launcher provides them in its own way, so programs
usually contain code that works on one cluster only. ``init()`` detects the launcher and uses the rendezvous that the
launcher offers. Processes that do not have the secret of the job (docs/security.md) cannot join the group. On one host
its ranks listen at loopback addresses only.

The rendezvous is the first of these that applies:

1. ``init_method``
2. torchrun, or the variables that torchrun sets
3. mpirun of Open MPI, MPICH, Intel MPI or MVAPICH, and prun, over mpi4py
4. Flux, over PMI
5. srun
6. HPE's PALS, over mpi4py
7. any process manager that offers PMI-1 or PMIx
8. none: the process is a group of one rank
"""

import atexit
import faulthandler
import os
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .._output import print_notice
from ..agreement import gather_values
from ..autoload import default_backend, register
from ..rendezvous import mpi_exchange
from ..rendezvous.detect_launcher import Launcher, detect, from_url
from ..rendezvous.hosts import Placement, host_id
from ..rendezvous.launcher_rendezvous import rendezvous_of
from ..rendezvous.network import loopback_interface
from ..rendezvous.rank_values import values_of_ranks, wait_for_readers
from ..rendezvous.secret import REMEDY
from ..rendezvous.url_rendezvous import Rendezvous

__all__: list[str] = []

_FIVE_MINUTES = 300.0
_DESTROY_TIMEOUT = 30.0  # seconds
# gloo's threads release tensors a little after the wait for them has returned. If the interpreter has been finalised by
# then, a thread is ended in the middle of a destructor, and the process aborts.
_TENSOR_RELEASE_TIME = 0.1  # seconds


@dataclass(frozen=True)
class _Joined:
    """The group that init() has joined, and the arguments with which a further call must agree."""

    group: weakref.ref[Any]  # a destroyed group must not keep its memory until the next init()
    placement: Placement
    arguments: dict[str, Any]


_joined: _Joined | None = None


def init(
    backend: str | None = None,
    timeout: float | timedelta | None = None,
    *,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Placement:
    """Join the default group under any launcher, and return the placement of its ranks.

    >>> def local_ranks():
    ...     place = init()  # spawned ranks have joined already; a second call returns the same placement
    ...     return place.local_rank
    >>> from dist_prims import spawn
    >>> spawn(local_ranks, 2)
    [0, 1]

    - ``backend``: the same on all ranks. The default is "dist_prims", with NCCL for CUDA tensors if CUDA is available;
      where its library cannot be had, "gloo", and a line says why.
    - ``timeout``: of the rendezvous and of each collective, in seconds or as a timedelta; by default 5 minutes.
    - ``init_method``: "env://", "tcp://host:port" or "file:///path"; with it ``rank`` and ``world_size`` may be given;
      by default the launcher is detected. Variables of several ranks that belong to no known launcher are an error.

    Rank 0 prints one line about launcher, hosts and backend on stderr, unless ``DIST_PRIMS_QUIET=1``. A group on one
    host uses the loopback interface: ``init()`` sets ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` unless they are
    set. The group is destroyed when the process exits.
    """
    global _joined
    # 1. A group exists already: it must be the requested one.
    requested: dict[str, Any] = {"backend": backend, "timeout": timeout, "init_method": init_method}
    requested.update(rank=rank, world_size=world_size)
    if dist.is_initialized():
        _joined = _existing_group(requested)
        return _joined.placement
    if init_method is None and (rank is not None or world_size is not None):
        raise ValueError(f"init: rank={rank} and world_size={world_size} have no effect without init_method=")
    # 2. The rendezvous, after which this rank knows the hosts of all ranks.
    register()
    launcher = from_url(init_method, rank, world_size) if init_method else detect()
    seconds = _seconds(_FIVE_MINUTES if timeout is None else timeout)
    rendezvous = rendezvous_of(launcher, seconds)
    placement = Placement.of(rendezvous.rank, rendezvous.hosts)
    # 3. The group, which is destroyed at exit.
    backend = _agreed_backend(backend, placement, rendezvous)
    dist.init_process_group(
        backend,
        store=rendezvous.store,
        rank=placement.rank,
        world_size=placement.size,
        timeout=timedelta(seconds=seconds),
    )
    if launcher.medium == "MPI":
        mpi_exchange.abort_on_exception()
    arguments = {"backend": backend, "timeout": seconds, "rank": placement.rank, "world_size": placement.size}
    _joined = _Joined(weakref.ref(dist.group.WORLD), placement, {**arguments, "init_method": init_method})
    atexit.unregister(_destroy)
    atexit.register(_destroy)
    _announce(placement, launcher, rendezvous, backend)
    return placement


def _agreed_backend(backend: str | None, placement: Placement, rendezvous: Rendezvous) -> str:
    """Return the backend of all ranks; RuntimeError if two ranks differ, because they would wait for each other."""
    backend = backend or default_backend(announces=placement.local_rank == 0)
    rendezvous.store.set(f"backend/{placement.rank}", backend)
    backends = values_of_ranks(rendezvous.store, placement.rank, "backend", placement.size)
    for rank, other in enumerate(backends):
        if other != backends[0]:
            wait_for_readers(rendezvous.store, placement.rank, "backend", placement.size)
            raise RuntimeError(
                f"init: rank {placement.rank}: rank 0 has the backend {backends[0]!r}, and rank {rank} has {other!r}; "
                'name one that all ranks have, such as init("gloo")'
            )
    return backend


def _existing_group(requested: dict[str, Any]) -> _Joined:
    """Return the default group, which the program may have created itself; ValueError if other arguments are requested.

    Every rank must call this for a group that the program has created: the ranks gather their hosts.
    """
    existing = _joined
    if existing is None or existing.group() is not dist.group.WORLD:
        hosts = gather_values(host_id(), dist.group.WORLD)
        arguments = {"backend": dist.get_backend(), "rank": dist.get_rank(), "world_size": dist.get_world_size()}
        existing = _Joined(weakref.ref(dist.group.WORLD), Placement.of(dist.get_rank(), hosts), arguments)
    for name, value in requested.items():
        argument = _seconds(value) if name == "timeout" and value is not None else value
        if argument is not None and argument != existing.arguments.get(name, argument):
            raise ValueError(
                f"init: this process has joined a group with {name}={existing.arguments[name]!r} and cannot join "
                f"one with {name}={argument!r}; call torch.distributed.destroy_process_group() between the two calls"
            )
    return existing


def _seconds(timeout: float | timedelta) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if seconds <= 0:
        raise ValueError(f"init: timeout is {seconds:g} s; give a positive time")
    return seconds


def _announce(placement: Placement, launcher: Launcher, rendezvous: Rendezvous, backend: str) -> None:
    """Print the line of rank 0 about launcher, hosts, backend and authentication."""
    if placement.rank != 0 or launcher.name == "spawn" or os.environ.get("DIST_PRIMS_QUIET") == "1":
        return
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "the default interface")
    where = "loopback" if interface == loopback_interface() else interface
    ranks, hosts = _count(placement.size, "rank"), _count(len(placement.hosts), "host")
    is_open = placement.size > 1 and rendezvous.secret is None and not (launcher.url or "").startswith("file:")
    trust = f"; the ranks are not authenticated, {REMEDY}" if is_open else ""
    print_notice(f"{ranks} on {hosts} by {rendezvous.launcher}, {backend} over {where}{trust}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _destroy() -> None:
    """Destroy the default group, as an exit handler of the process."""
    global _joined
    if dist.is_initialized():
        faulthandler.dump_traceback_later(_DESTROY_TIMEOUT, exit=True)  # the group may wait for ranks that have exited
        group = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        _joined = None  # the group's threads are joined when the last reference to the group is dropped
        if group() is not None:  # a graph or an optimizer, for example, still refers to the group
            time.sleep(_TENSOR_RELEASE_TIME)
        faulthandler.cancel_dump_traceback_later()
    _joined = None
