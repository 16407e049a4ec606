"""The options of a group of the backend, and those that each group was made with."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..autoload import NAME
from ..collectives.algorithm_choice import parse_ranges
from .transport_selection import ENGINES

__all__ = ["Options", "keep_options", "options_of"]

_options: dict[str, Options | None] = {}  # by the name of a group


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
        if engine not in ENGINES:
            raise ValueError(f"Options(engine={engine!r}): 'gloo' or 'mpi'")
        parse_ranges(all_reduce, "all_reduce", "Options(all_reduce=...)")
        self.all_reduce = all_reduce
        self.slot_bytes = slot_bytes
        self.one_shot_bytes = one_shot_bytes
        self.engine = engine


def keep_options(group_name: str, given: Any) -> Options:
    """Remembers what the user gave for a group, and returns it, or the defaults."""
    _options[group_name] = given if isinstance(given, Options) else None
    return _options[group_name] or Options()


def options_of(group: dist.ProcessGroup) -> Options | None:
    """The options that a group of this backend was made with, or None."""
    return _options.get(group.group_name) if NAME in dist.get_backend_config(group) else None
