"""Options of a group of the backend, and a registry of the options of each group."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from weakref import WeakValueDictionary

import torch.distributed as dist

from ..backend_name import NAME
from ..collectives.algorithm_choice import parse_ranges
from ..schedules.contract import COLLECTIVES
from ..schedules.registry import nearest
from .transport_selection import CHOICES, TRANSPORTS

__all__: list[str] = []

PINNABLE = tuple(collective for collective in COLLECTIVES if collective not in ("scan", "exclusive_scan"))
_OTHERS = ("slot_bytes", "one_shot_bytes", "transport")
_SLOT_BYTES = 1 << 20  # the default size of a slot in shared memory
_MOST_BYTES = 1 << 40
# By the name of a group. A group keeps its options alive, so the options of a group that has ended do not stay here,
# unless the program keeps them itself.
_options: WeakValueDictionary[str, BackendOptions] = WeakValueDictionary()


class BackendOptions:
    """Options of a group of the backend, as ``pg_options`` of ``init_process_group`` or ``new_group``.

    - ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``reduce``, ``gather``, ``scatter``,
      ``all_to_all``, ``barrier``: the algorithm of the collective, also one that the program registers, by name or by
      ranges of sizes as in ``DIST_PRIMS_ALL_REDUCE``: ``"ring x4:1M-max"`` runs a ring in 4 segments from 1 MB. The
      default is ``DIST_PRIMS_<COLLECTIVE>``, or the choice of the backend.
    - ``slot_bytes``: the size of a slot in shared memory, of which each rank has two. Larger slots allow larger
      segments. From 1 to 2**40; a slot has at least 4 K. The default is ``DIST_PRIMS_SLOT_BYTES``, or 1 M.
    - ``one_shot_bytes``: up to this size every rank of an all_reduce adds the whole data of all ranks. Above it, each
      rank adds one part, and all ranks read the sums. The default is the value that ``python -m dist_prims tune`` has
      measured on this type of machine, or 32 K. From 0 to 2**40.
    - ``transport``: the transport between hosts, "tcp", "ucx" or "mpi". The default is ``DIST_PRIMS_TRANSPORT``, or
      MPI if mpirun has started the ranks and all of them can use MPI, else TCP. The option of rank 0 applies to all
      ranks. If a rank cannot use the requested transport, all ranks raise RuntimeError with that rank and the reason.

    >>> BackendOptions(all_reduce="ring:1M-max", all_gather="bruck").algorithms["all_gather"]
    'bruck'
    """

    def __init__(
        self,
        all_reduce: str = "",
        slot_bytes: int | None = None,
        one_shot_bytes: int | None = None,
        transport: str = "",
        **algorithms: str,
    ) -> None:
        if transport not in TRANSPORTS:
            raise ValueError(f"BackendOptions(transport={transport!r}): {CHOICES}")
        algorithms = {"all_reduce": all_reduce, **algorithms}
        for collective, text in algorithms.items():
            if collective not in PINNABLE:
                raise TypeError(f"BackendOptions: {nearest('option', collective, (*PINNABLE, *_OTHERS))}")
            parse_ranges(text, collective, f"BackendOptions({collective}=...)")
        self.algorithms: Mapping[str, str] = MappingProxyType(algorithms)
        self.slot_bytes = None if slot_bytes is None else _checked_bytes("slot_bytes", slot_bytes, 1)
        self.one_shot_bytes = None if one_shot_bytes is None else _checked_bytes("one_shot_bytes", one_shot_bytes, 0)
        self.transport = transport

    @property
    def all_reduce(self) -> str:
        return self.algorithms["all_reduce"]


def slot_bytes_of(options: BackendOptions) -> int:
    """Return the size of a slot: the option, ``DIST_PRIMS_SLOT_BYTES``, or the default.

    >>> slot_bytes_of(BackendOptions(slot_bytes=4096))
    4096
    """
    if options.slot_bytes is not None:
        return options.slot_bytes
    text = os.environ.get("DIST_PRIMS_SLOT_BYTES", "")
    return _checked_bytes("slot_bytes", int(text) if text.isdecimal() else text, 1) if text else _SLOT_BYTES


def _checked_bytes(option: str, value: object, least: int) -> int:
    """Return ``value`` if it is an int from ``least`` to 2**40, else raise ValueError.

    Larger sizes overflow the size of the shared memory.
    """
    if isinstance(value, int) and least <= value <= _MOST_BYTES:
        return value
    variable = " or DIST_PRIMS_SLOT_BYTES" if option == "slot_bytes" else ""
    raise ValueError(
        f"BackendOptions({option}=...){variable}: {value!r} is not a number of bytes from {least} to {_MOST_BYTES} "
        f"(2**40); give one, or leave it out"
    )


def keep_options(group_name: str, given: BackendOptions | None) -> BackendOptions:
    """Store the options of a group, and return them, or the defaults if the caller gave none."""
    _options.pop(group_name, None)  # of an earlier group of this name
    if given is None:
        return BackendOptions()
    _options[group_name] = given
    return given


def options_of(group: dist.ProcessGroup) -> BackendOptions | None:
    """Return the options with which a group of this backend was created, or None.

    >>> def pinned_algorithm():
    ...     group = dist.new_group(pg_options=BackendOptions(all_reduce="ring"))
    ...     return options_of(group).all_reduce
    >>> import dist_prims
    >>> dist_prims.spawn(pinned_algorithm, 2, backend="dist_prims", timeout=60)
    ['ring', 'ring']
    """
    return _options.get(group.group_name) if NAME in dist.get_backend_config(group) else None
