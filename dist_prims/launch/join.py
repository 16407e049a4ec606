"""Join the ranks that one launcher started into one group, whichever launcher it was.

``torch.distributed`` wants to be told address, port, rank and size. Every launcher knows them and says them in its own
way, so programs carry a page of glue that fits one cluster. Here the launcher is detected, the ranks meet in the way
that it offers, and the group is theirs alone: on one host nothing listens beyond loopback.
"""

import atexit
import faulthandler
import os
import sys
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..autoload import register
from . import mpi
from .detect import Launcher, detect, from_url
from .hosts import Placement, host_id
from .launcher_rendezvous import meet
from .network import loopback_interface

__all__ = ["init"]

_FIVE_MINUTES = 300.0
_SECONDS_TO_LEAVE = 30.0
# gloo's threads let go of tensors a little after the wait for them has returned. If the interpreter has gone by then, a
# thread is ended in the middle of a destructor, and the process aborts.
_SECONDS_TO_LET_GO = 0.1


@dataclass(frozen=True)
class _Joined:
    group: Any
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
    """Join the default group under whatever started this process, and say where its ranks run.

    >>> def local_ranks():
    ...     place = init()  # the spawned ranks have joined already: a second time is harmless
    ...     return place.local_rank
    >>> from dist_prims import spawn
    >>> spawn(local_ranks, 2)
    [0, 1]

    In this order: ``init_method`` ("env://", "tcp://host:port", "file:///path"), torchrun or its variables, mpirun
    (Open MPI, MPICH, Intel MPI, MVAPICH, over mpi4py), prun (likewise), Flux (over PMI), srun, HPE's PALS (over
    mpi4py), any process manager that offers PMI-1 or PMIx; a plain process is a group of one. Variables that speak of
    several ranks and belong to no such launcher are an error. ``backend`` is "gloo", with NCCL for CUDA tensors where
    there is CUDA. ``timeout`` bounds the joining and each collective of the group: 5 minutes.

    One line on stderr says what was found (not if ``DIST_PRIMS_QUIET=1``). A group on one host keeps to loopback, by
    way of ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` unless they are set. The group is left when the process
    ends.
    """
    global _joined
    asked = {"backend": backend, "timeout": timeout, "init_method": init_method, "rank": rank, "world_size": world_size}
    if dist.is_initialized():
        _joined = _same_as_before(asked)
        return _joined.placement
    if init_method is None and (rank is not None or world_size is not None):
        raise ValueError(f"init: rank={rank} and world_size={world_size} say nothing without init_method=")
    register()
    launcher = from_url(init_method, rank, world_size) if init_method else detect()
    backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    seconds = _seconds(_FIVE_MINUTES if timeout is None else timeout)
    meeting = meet(launcher, seconds)
    placement = Placement.of(meeting.rank, meeting.hosts)
    dist.init_process_group(
        backend,
        store=meeting.store,
        rank=placement.rank,
        world_size=placement.size,
        timeout=timedelta(seconds=seconds),
    )
    if launcher.medium == "MPI":
        mpi.abort_on_exception()
    known = {"backend": backend, "timeout": seconds, "rank": placement.rank, "world_size": placement.size}
    _joined = _Joined(dist.group.WORLD, placement, {**known, "init_method": init_method})
    atexit.unregister(_leave)
    atexit.register(_leave)
    _announce(placement, launcher, meeting.by, backend)
    return placement


def _same_as_before(asked: dict[str, Any]) -> _Joined:
    """The group that we are in, provided that it is the one asked for; someone else may have made it."""
    before = _joined
    if before is None or before.group is not dist.group.WORLD:
        hosts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(hosts, host_id())
        known = {"backend": dist.get_backend(), "rank": dist.get_rank(), "world_size": dist.get_world_size()}
        before = _Joined(dist.group.WORLD, Placement.of(dist.get_rank(), hosts), known)
    for name, value in asked.items():
        wanted = _seconds(value) if name == "timeout" and value is not None else value
        if wanted is not None and wanted != before.arguments.get(name, wanted):
            raise ValueError(
                f"init: this process has joined with {name}={before.arguments[name]!r} and is now asked for "
                f"{name}={wanted!r}; call torch.distributed.destroy_process_group() between the two"
            )
    return before


def _seconds(timeout: float | timedelta) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if seconds <= 0:
        raise ValueError(f"init: timeout is {seconds:g} s; give a time that can pass")
    return seconds


def _announce(placement: Placement, launcher: Launcher, by: str, backend: str) -> None:
    if placement.rank != 0 or launcher.name == "spawn" or os.environ.get("DIST_PRIMS_QUIET") == "1":
        return
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "the default interface")
    where = "loopback" if interface == loopback_interface() else interface
    ranks, hosts = _count(placement.size, "rank"), _count(len(placement.hosts), "host")
    print(f"dist_prims: {ranks} on {hosts} by {by}, {backend} over {where}", file=sys.stderr, flush=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _leave() -> None:
    global _joined
    if dist.is_initialized():
        faulthandler.dump_traceback_later(_SECONDS_TO_LEAVE, exit=True)  # leaving may wait for ranks that are gone
        left = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        _joined = None  # the group's threads are joined where the last reference to it goes
        if left() is not None:  # a graph, an optimizer or the like holds it
            time.sleep(_SECONDS_TO_LET_GO)
        faulthandler.cancel_dump_traceback_later()
    _joined = None
