"""Creates one group of the backend "dist_prims" on one of its ranks; torch calls :func:`make`."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..autoload import NAME
from ..collectives.algorithm_choice import parse_ranges
from ..collectives.proofs import Proofs
from ..errors import PeerDied
from ..launch.hosts import host_id
from ..launch.rendezvous import from_rank_0, greet
from ..schedules import Schedule, build
from ..schedules.native import to_native
from ..torch_compat import backend_of, default_group, device_types, nccl_options
from . import mpi, transport_selection
from .extension import extension
from .flight_record import dump_file
from .multi_host import ASSUMED, MultiHostSchedules
from .options import Options, keep_options
from .tuning import CALIBRATION, tuned

__all__ = ["make"]

_SLOT_BYTES = 1 << 20  # of shared memory; a rank has two
_PINNED = "DIST_PRIMS_ALL_REDUCE"
_LARGEST_TAG_OF_GLOO = 2**31 - 1
_CPU = torch.device("cpu")
_MOMENT_TO_DIE = 0.5  # seconds


def make(options: Any, given: Any = None) -> Any:
    """The backend for a group; ``options`` are torch's: store, rank, size, timeout; ``given``: ours."""
    chosen = keep_options(str(options.group_id), given)
    deaths = _Deaths(options)
    try:
        return _make(options, chosen, deaths)
    except dist.DistError:  # a rank that dies may take the store with it
        deaths.wait_and_raise()
        raise


def _make(options: Any, chosen: Options, deaths: _Deaths) -> Any:
    rank, size = options.group_rank, options.group_size
    timeout = timedelta(seconds=options.timeout.total_seconds())
    ranks = list(options.global_ranks_in_group) or list(range(size))
    store, hosts = _greet(dist.PrefixStore(NAME, options.store), rank, size, timeout, deaths)
    spans = len(set(hosts)) > 1
    check = functools.partial(Proofs(store, rank).require, timeout=timeout)
    multi_host = MultiHostSchedules(hosts, rank, _levels_of_rank_0(store, rank, ranks), check) if spans else None
    make_gloo = functools.cache(lambda: dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout))
    engine = None
    if spans:
        asked = chosen.engine or os.environ.get("DIST_PRIMS_ENGINE", "")
        engine = (
            mpi.make(ranks, timeout) if transport_selection.select(store, rank, ranks, asked) == "mpi" else make_gloo()
        )
    backend = extension().PrimsBackend(
        store=store,
        rank=rank,
        size=size,
        timeout=timeout,
        hosts=_short(hosts),
        engine=engine,
        largest_tag=getattr(engine, "largest_tag", _LARGEST_TAG_OF_GLOO),
        make_gloo=make_gloo,
        choose=multi_host.choose if multi_host else _never,
        accelerator=_nccl(store, rank, size, timeout),
        slot_bytes=chosen.slot_bytes or int(os.environ.get("DIST_PRIMS_SLOT_BYTES", _SLOT_BYTES)),
        one_shot_bytes=tuned(size, speaks=ranks[rank] == 0) if chosen.one_shot_bytes is None else chosen.one_shot_bytes,
        group=str(options.group_id),
        ranks=str(ranks),
        dump=dump_file(str(options.group_id), rank),
        ended=deaths.first,
    )
    _pin(backend, rank, size, chosen, multi_host, check)
    return backend


class _Deaths:
    """Deaths of ranks while a group of theirs is made, as the default group sees them: it watches all processes of this
    host. Where the new group is the default group, or that has another backend, none is seen before the ranks have
    attached to each other."""

    def __init__(self, options: Any) -> None:
        self._rank: int = options.group_rank
        self._ranks: list[int] = list(options.global_ranks_in_group)
        self._ended: Callable[[], list[int]] = list
        if self._ranks and dist.is_initialized():
            default = default_group()
            if _CPU.type in device_types(default):
                self._ended = getattr(backend_of(default, _CPU), "ended", list)

    def first(self) -> int:
        """A rank of the new group whose process has ended; -1 if there is none."""
        return next((self._ranks.index(rank) for rank in self._ended() if rank in self._ranks), -1)

    def look(self) -> None:
        if (culprit := self.first()) >= 0:
            raise PeerDied(
                f"rank {self._rank}: rank {culprit} has died while the group was made; look at what it printed last, "
                "and start the group again"
            )

    def wait_and_raise(self) -> None:
        """Connections end a moment before their process does."""
        deadline = time.monotonic() + _MOMENT_TO_DIE
        while time.monotonic() < deadline:
            self.look()
            time.sleep(0.01)


def _greet(store: Any, rank: int, size: int, timeout: timedelta, deaths: _Deaths) -> tuple[Any, list[str]]:
    """A store that only this meeting of the ranks uses, and the host of each."""
    store.set_timeout(timeout)
    if size == 1:
        return store, [host_id()]
    name, hosts = greet(store, rank, size, time.monotonic() + timeout.total_seconds(), deaths.look)
    return dist.PrefixStore(name, store), hosts


def _levels_of_rank_0(store: Any, rank: int, ranks: list[int]) -> Mapping[str, Any]:
    """The figures by which all ranks choose schedules, so that they choose alike."""

    def read() -> str:
        return json.dumps(CALIBRATION.read(speaks=ranks[0] == 0) or ASSUMED)

    levels: Mapping[str, Any] = json.loads(from_rank_0(store, rank, len(ranks), "levels", read))
    return levels


def _short(hosts: list[str]) -> list[str]:
    """Names without what makes them unique, if they are so anyway."""
    short = [host.rpartition("-")[0] or host for host in hosts]
    return short if len(set(short)) == len(set(hosts)) else hosts


def _never(collective: str, nbytes: int, root: int) -> Any:
    raise AssertionError(f"{collective} of {nbytes} bytes: ranks of one host need no schedule")


def _pin(
    backend: Any,
    rank: int,
    size: int,
    chosen: Options,
    multi_host: MultiHostSchedules | None,
    check: Callable[[Schedule], None],
) -> None:
    text = chosen.all_reduce or os.environ.get(_PINNED, "")
    pins = []
    for name, low, high in parse_ranges(text, "all_reduce", _PINNED):
        shape = {"hosts": multi_host.topology.hosts} if multi_host and name == "hierarchical" else {}
        schedule = build("all_reduce", name, size, **shape)
        check(schedule)
        pins.append(
            to_native(schedule, rank, low, high, name, rank_at=multi_host.seats.rank_at if multi_host else None)
        )
    backend.pin(pins)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return None
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, nccl_options(timeout))
