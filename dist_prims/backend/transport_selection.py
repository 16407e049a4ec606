"""Selection of the transport between the hosts of a group: TCP, or MPI or UCX where every rank can use it.

All ranks must use the same transport. MPI or UCX may be usable on some ranks only: on one host a library may not be
built or installed, or MPI may not support threads. Rank 0 therefore proposes a transport in the handshake. If it is MPI
or UCX, every rank answers with the reason why it cannot use that transport, if any, and rank 0 decides.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ..rendezvous.detect_launcher import detect
from ..rendezvous.rank_values import from_rank_0, values_of_ranks
from . import mpi_library, ucx_library

__all__: list[str] = []

TRANSPORTS = ("", "tcp", "mpi", "ucx")
CHOICES = "'tcp', 'ucx' or 'mpi'"
_TITLES = {"mpi": "MPI", "ucx": "UCX"}  # the transports that a rank may be unable to use


def select(store: Any, rank: int, ranks: Sequence[int], proposed: str, is_requested: bool) -> str:
    """Return the transport of a group, the same on every rank: "tcp", "ucx" or "mpi". Every rank calls this.

    Args:
        store: the store of the group.
        rank: this rank.
        ranks: the ranks of the group as global ranks.
        proposed: by rank 0, see :func:`propose`.
        is_requested: whether the user requests a transport; the request of rank 0 applies. If a rank cannot use it, all
            ranks raise RuntimeError. Without a request, TCP replaces a transport that a rank cannot use, with a warning
            on rank 0.
    """
    if proposed not in _TITLES:
        return proposed
    # 1. Every rank publishes why it cannot use the proposal, or an empty text. All wait for these answers, although
    # only rank 0 uses them, so that each names a rank that is missing, and not rank 0.
    reason = ucx_library.unusable_reason() if proposed == "ucx" else mpi_library.group_unusable_reason(ranks, rank)
    size = len(ranks)
    store.set(f"transport/{rank}", reason)
    answers = enumerate(values_of_ranks(store, rank, "transport", size))
    reasons = {answering: answer for answering, answer in answers if answer}
    # 2. Rank 0 decides.
    return from_rank_0(store, rank, size, "transport chosen", lambda: _decide(proposed, reasons, is_requested))


def propose(ranks: Sequence[int], requested: str) -> str:
    """Return the transport that rank 0 proposes. ``requested``: by the user; empty without a request."""
    if requested not in TRANSPORTS:
        raise ValueError(
            f"DIST_PRIMS_TRANSPORT={requested!r}: {CHOICES}; unset it for MPI where mpirun started the ranks"
        )
    return requested or ("mpi" if _is_mpi_expected(ranks) else "tcp")


def _is_mpi_expected(ranks: Sequence[int]) -> bool:
    """Whether to propose MPI: it is usable on this rank, or an MPI launcher has started this rank."""
    try:
        started = detect().medium == "MPI"
    except ValueError:  # a caller with a store of its own needs no launcher
        started = False
    return started or not mpi_library.group_unusable_reason(ranks, 0)


def _decide(proposed: str, reasons: Mapping[int, str], is_requested: bool) -> str:
    """Return the transport of the group. ``reasons``: by rank, of the ranks that cannot use the proposed one."""
    if not reasons:
        return proposed
    rank, first_reason = next(iter(reasons.items()))  # the other ranks usually have the same
    count = f", first of {len(reasons)} ranks" if len(reasons) > 1 else ""
    title = _TITLES[proposed]
    reason = f"{title} cannot be the transport between the hosts of this group (rank {rank}{count}: {first_reason})"
    if is_requested:
        raise RuntimeError(f"{reason}; to use TCP instead: DIST_PRIMS_TRANSPORT=tcp")
    remedy = "set DIST_PRIMS_TRANSPORT=tcp to use TCP without this warning"
    warnings.warn(f"{reason}; using TCP instead; {remedy}", stacklevel=4)
    return "tcp"
