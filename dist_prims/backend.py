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
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .autoload import NAME
from .collectives.choose import parse_ranges
from .engines import mpi
from .launch.hosts import host_id
from .launch.rendezvous import greet
from .schedules import build
from .spanning import ASSUMED, Spanning, told
from .tuning import calibrated, tuned

__all__ = ["Options", "all_reduce_", "dump", "empty", "make"]

_SLOT_BYTES = 1 << 20  # of shared memory; a rank has two
_PINNED = "DIST_PRIMS_ALL_REDUCE"
_CPU = torch.device("cpu")
_direct: dict[int, Callable[..., None]] = {}  # by the id of a group that lives


class Options:
    """How a group of the backend works, as ``pg_options`` of ``init_process_group`` or ``new_group``.

    ``all_reduce``: the algorithm, by name or by ranges of sizes as in ``DIST_PRIMS_ALL_REDUCE``; your own included.
    ``slot_bytes``: of shared memory, two of them for each rank; larger ones serve larger segments.
    ``one_shot_bytes``: up to here every rank of an all_reduce adds everything at once; beyond, each adds its part and
    the sums are shared. Unless given, what ``python -m dist_prims tune`` found on this machine, or 32 K.
    ``engine``: what carries messages between hosts, "gloo" or "mpi", or ``DIST_PRIMS_ENGINE``; unless given, MPI where
    mpirun has started the ranks and gloo elsewhere. Rank 0's counts.

    >>> Options(all_reduce="ring:1M-max").all_reduce
    'ring:1M-max'
    """

    def __init__(
        self, all_reduce: str = "", slot_bytes: int = 0, one_shot_bytes: int | None = None, engine: str = ""
    ) -> None:
        if engine not in ("", "gloo", "mpi"):
            raise ValueError(f"Options(engine={engine!r}): 'gloo' or 'mpi'")
        parse_ranges(all_reduce, "all_reduce", "Options(all_reduce=...)")
        self.all_reduce = all_reduce
        self.slot_bytes = slot_bytes
        self.one_shot_bytes = one_shot_bytes
        self.engine = engine


def empty(shape: Sequence[int] | int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor in memory that the other ranks of this host can map: an all_reduce that finds all of its tensors in such
    memory reads and writes them where they lie, without a copy. Every rank may allocate when it likes.

    Not to be used in a process forked from this one: there the memory is not mapped.
    """
    sizes = [shape] if isinstance(shape, int) else list(shape)
    if any(size < 0 for size in sizes):
        raise ValueError(f"empty: a shape has no negative sizes, and this is {tuple(sizes)}")
    tensor: torch.Tensor = _extension().empty(sizes, dtype)
    return tensor


def all_reduce_(
    tensor: torch.Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Reduce ``tensor`` in place over the ranks of a group and return it: ``torch.distributed.all_reduce`` without what
    that adds to each call. For a group whose backend is another one it is the same as that."""
    of = group or dist.distributed_c10d._get_default_group()
    call = _direct.get(id(of)) or _direct_call(of)
    call(tensor, op)
    return tensor


def _direct_call(group: dist.ProcessGroup) -> Callable[..., None]:
    """The backend's own call, looked up once for a group."""
    backend: Any = group._get_backend(_CPU)
    call = getattr(backend, "all_reduce_", None) or functools.partial(_through_torch, weakref.ref(group))
    _direct[id(group)] = call
    weakref.finalize(group, _direct.pop, id(group), None)
    return call


def _through_torch(group: weakref.ref[dist.ProcessGroup], tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
    dist.all_reduce(tensor, op, group())


def dump(path: Path | str, group: dist.ProcessGroup | None = None) -> None:
    """Write the last calls of this rank to a file, in the form of PyTorch's flight recorder; ``python -m dist_prims
    doctor --dump`` reads those of all ranks and says which one is behind."""
    backend: Any = (group or dist.distributed_c10d._get_default_group())._get_backend(_CPU)
    Path(path).write_text(backend.record())


def make(options: Any, given: Any = None) -> Any:
    """The backend for a group; ``options`` are torch's: store, rank, size, timeout; ``given``: ours."""
    chosen = given if isinstance(given, Options) else Options()
    rank, size = options.group_rank, options.group_size
    timeout = timedelta(seconds=options.timeout.total_seconds())
    ranks = list(options.global_ranks_in_group) or list(range(size))
    store, hosts = _greet(dist.PrefixStore(NAME, options.store), rank, size, timeout)
    spans = len(set(hosts)) > 1
    shared = _of_rank_0(store, rank, ranks, chosen) if spans else {}
    spanning = Spanning(hosts, rank, shared["levels"]) if spans else None
    make_gloo = functools.cache(lambda: dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout))
    backend = _extension().PrimsBackend(
        store=store,
        rank=rank,
        size=size,
        timeout=timeout,
        hosts=_short(hosts),
        engine=(mpi.make(ranks, timeout) if shared["engine"] == "mpi" else make_gloo()) if spans else None,
        make_gloo=make_gloo,
        choose=spanning.choose if spanning else _never,
        accelerator=_nccl(store, rank, size, timeout),
        slot_bytes=chosen.slot_bytes or int(os.environ.get("DIST_PRIMS_SLOT_BYTES", _SLOT_BYTES)),
        one_shot_bytes=tuned(size) if chosen.one_shot_bytes is None else chosen.one_shot_bytes,
        group=str(options.group_id),
        ranks=str(ranks),
        dump=_dump_file(str(options.group_id), rank),
    )
    _pin(backend, rank, size, chosen, spanning)
    return backend


def _greet(store: Any, rank: int, size: int, timeout: timedelta) -> tuple[Any, list[str]]:
    """A store that only this meeting of the ranks uses, and the host of each."""
    store.set_timeout(timeout)
    if size == 1:
        return store, [host_id()]
    name, hosts = greet(store, rank, size, time.monotonic() + timeout.total_seconds())
    return dist.PrefixStore(name, store), hosts


def _of_rank_0(store: Any, rank: int, ranks: list[int], chosen: Options) -> Mapping[str, Any]:
    """What all must do alike: the engine between hosts, and by which figures schedules are chosen."""
    if rank == 0:
        engine = chosen.engine or os.environ.get("DIST_PRIMS_ENGINE", "") or ("mpi" if mpi.holds(ranks) else "gloo")
        store.set("rank 0", json.dumps({"engine": engine, "levels": calibrated() or ASSUMED}))
    found: Mapping[str, Any] = json.loads(store.get("rank 0"))
    return found


def _short(hosts: list[str]) -> list[str]:
    """Names without what makes them unique, if they are so anyway."""
    short = [host.rpartition("-")[0] or host for host in hosts]
    return short if len(set(short)) == len(set(hosts)) else hosts


def _never(collective: str, nbytes: int, root: int) -> Any:
    raise AssertionError(f"{collective} of {nbytes} bytes: ranks of one host need no schedule")


def _pin(backend: Any, rank: int, size: int, chosen: Options, spanning: Spanning | None) -> None:
    text = chosen.all_reduce or os.environ.get(_PINNED, "")
    pins = []
    for name, low, high in parse_ranges(text, "all_reduce", _PINNED):
        shape = {"hosts": spanning.topology.hosts} if spanning and name == "hierarchical" else {}
        schedule = build("all_reduce", name, size, **shape)
        schedule.verify()
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
        from . import _backend
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
