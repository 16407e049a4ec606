"""The backend "dist_prims" of ``torch.distributed``: one group of it, on one of its ranks.

Ranks of one host reduce in shared memory; those of several follow schedules over an engine, gloo or MPI. What is not
ours goes to another backend behind the same name: sparse tensors to gloo, CUDA tensors to NCCL where torch has it.
Ranks share a host if they say the same of it (see :mod:`.launch.hosts`) and then really attach: the memory comes over
a socket that is only seen on one host.

    torch.distributed.init_process_group("dist_prims")
    torch.distributed.init_process_group("dist_prims", pg_options=dist_prims.Options(all_reduce="ring"))

Memory that ranks reduce where it lies, and a call with less in its way:

>>> import torch, dist_prims
>>> gradient = dist_prims.empty((3, 2), torch.float32).fill_(1)
>>> dist_prims.all_reduce_(gradient).tolist()
[[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..autoload import NAME
from ..collectives.algorithm_choice import parse_ranges
from ..collectives.native import all_reduce_
from ..collectives.proofs import Proofs
from ..errors import PeerDied
from ..launch.hosts import host_id
from ..launch.rendezvous import from_rank_0, greet
from ..schedules import Schedule, build
from ..schedules.native import told
from . import mpi, transport_selection
from .multi_host import ASSUMED, Spanning
from .tuning import CALIBRATION, tuned

__all__ = ["Options", "all_reduce_", "dump", "empty", "make", "options_of"]

_SLOT_BYTES = 1 << 20  # of shared memory; a rank has two
_PINNED = "DIST_PRIMS_ALL_REDUCE"
_LARGEST_TAG_OF_GLOO = 2**31 - 1
_CPU = torch.device("cpu")
_MOMENT_TO_DIE = 0.5  # seconds
_given: dict[str, Options | None] = {}  # by the name of a group


class Options:
    """How a group of the backend works, as ``pg_options`` of ``init_process_group`` or ``new_group``.

    ``all_reduce``: the algorithm, by name or by ranges of sizes as in ``DIST_PRIMS_ALL_REDUCE``; your own included. A
    schedule that is pinned so runs in one segment. Other collectives cannot be pinned.
    ``slot_bytes``: of shared memory, two of them for each rank; larger ones serve larger segments.
    ``one_shot_bytes``: up to here every rank of an all_reduce adds everything at once; beyond, each adds its part and
    the sums are shared. Unless given, what ``python -m dist_prims tune`` found on this type of machine, or 32 K.
    ``engine``: what carries messages between hosts, "gloo" or "mpi", or ``DIST_PRIMS_ENGINE``; unless given, MPI where
    mpirun has started the ranks and all of them can use it, and gloo elsewhere. Rank 0's counts.

    >>> Options(all_reduce="ring:1M-max").all_reduce
    'ring:1M-max'
    """

    def __init__(
        self, all_reduce: str = "", slot_bytes: int = 0, one_shot_bytes: int | None = None, engine: str = ""
    ) -> None:
        if engine not in transport_selection.ENGINES:
            raise ValueError(f"Options(engine={engine!r}): 'gloo' or 'mpi'")
        parse_ranges(all_reduce, "all_reduce", "Options(all_reduce=...)")
        self.all_reduce = all_reduce
        self.slot_bytes = slot_bytes
        self.one_shot_bytes = one_shot_bytes
        self.engine = engine


def empty(shape: Sequence[int] | int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor in memory that the other ranks of this host can map: an all_reduce that finds all of its tensors in such
    memory reads and writes them where they lie, without a copy. Every rank may allocate when it likes.

    The memory is reserved here and freed with the tensor. If an all_reduce of the tensor fails, other than with a
    MismatchError, the tensor keeps its address but becomes ordinary memory of this process, so that a late rank cannot
    write to it. Not to be used in a process forked from this one: there the memory is not mapped.
    """
    sizes = [shape] if isinstance(shape, int) else list(shape)
    if any(size < 0 for size in sizes):
        raise ValueError(f"empty: a shape has no negative sizes, and this is {tuple(sizes)}")
    tensor: torch.Tensor = _extension().empty(sizes, dtype)
    return tensor


def options_of(group: dist.ProcessGroup) -> Options | None:
    """The options that a group of this backend was made with, or None."""
    return _given.get(group.group_name) if NAME in dist.get_backend_config(group) else None


def dump(path: Path | str, group: dist.ProcessGroup | None = None) -> None:
    """Write the last calls of this rank to a file, in the form of PyTorch's flight recorder; ``python -m dist_prims
    doctor --dump`` reads those of all ranks and says which one is behind."""
    backend: Any = (group or dist.distributed_c10d._get_default_group())._get_backend(_CPU)
    Path(path).write_text(backend.record())


def make(options: Any, given: Any = None) -> Any:
    """The backend for a group; ``options`` are torch's: store, rank, size, timeout; ``given``: ours."""
    _given[str(options.group_id)] = given if isinstance(given, Options) else None
    deaths = _Deaths(options)
    try:
        return _make(options, given if isinstance(given, Options) else Options(), deaths)
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
    spanning = Spanning(hosts, rank, _levels_of_rank_0(store, rank, ranks), check) if spans else None
    make_gloo = functools.cache(lambda: dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout))
    engine = None
    if spans:
        asked = chosen.engine or os.environ.get("DIST_PRIMS_ENGINE", "")
        engine = (
            mpi.make(ranks, timeout) if transport_selection.select(store, rank, ranks, asked) == "mpi" else make_gloo()
        )
    backend = _extension().PrimsBackend(
        store=store,
        rank=rank,
        size=size,
        timeout=timeout,
        hosts=_short(hosts),
        engine=engine,
        largest_tag=getattr(engine, "largest_tag", _LARGEST_TAG_OF_GLOO),
        make_gloo=make_gloo,
        choose=spanning.choose if spanning else _never,
        accelerator=_nccl(store, rank, size, timeout),
        slot_bytes=chosen.slot_bytes or int(os.environ.get("DIST_PRIMS_SLOT_BYTES", _SLOT_BYTES)),
        one_shot_bytes=tuned(size, speaks=ranks[rank] == 0) if chosen.one_shot_bytes is None else chosen.one_shot_bytes,
        group=str(options.group_id),
        ranks=str(ranks),
        dump=_dump_file(str(options.group_id), rank),
        ended=deaths.first,
    )
    _pin(backend, rank, size, chosen, spanning, check)
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
            default = dist.distributed_c10d._get_default_group()
            if _CPU in default._device_types:
                self._ended = getattr(default._get_backend(_CPU), "ended", list)

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
    spanning: Spanning | None,
    check: Callable[[Schedule], None],
) -> None:
    text = chosen.all_reduce or os.environ.get(_PINNED, "")
    pins = []
    for name, low, high in parse_ranges(text, "all_reduce", _PINNED):
        shape = {"hosts": spanning.topology.hosts} if spanning and name == "hierarchical" else {}
        schedule = build("all_reduce", name, size, **shape)
        check(schedule)
        pins.append(told(schedule, rank, low, high, name, rank_at=spanning.seats.rank_at if spanning else None))
    backend.pin(pins)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)


def _dump_file(group: str, rank: int) -> str:
    folder = os.environ.get("DIST_PRIMS_DUMP", "")
    return str(Path(folder) / f"{group}_rank{rank}.json") if folder else ""


def _extension() -> Any:
    remedy = "build it again: pip install --no-build-isolation --force-reinstall --no-deps <the source of dist_prims>"
    try:
        from .. import _backend
    except ImportError as error:
        raise ImportError(
            f"the extension of dist_prims does not load with torch {torch.__version__}: {error}. It is not built, or "
            f"for another torch; {remedy}"
        ) from error
    if torch.__version__ != _backend.built_for:
        raise ImportError(
            f"the extension of dist_prims was built for torch {_backend.built_for}, and this is {torch.__version__}; "
            f"{remedy}"
        )
    return _backend
