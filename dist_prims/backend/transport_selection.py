"""Which engine carries messages between the hosts of a group: gloo, or MPI where every rank can use it.

All ranks must use the same one, and MPI may be usable on some of them only: the extension may not be built on one host,
or MPI may not allow threads there. So rank 0 proposes MPI, every rank answers with what it lacks, and rank 0 decides.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ..launch.detect import detect
from ..launch.rendezvous import from_rank_0
from . import mpi

__all__ = ["ENGINES", "select"]

ENGINES = ("", "gloo", "mpi")


def select(store: Any, rank: int, ranks: Sequence[int], asked: str) -> str:
    """The engine for a group of these ranks, "gloo" or "mpi"; every rank calls this, with a store of the group.

    ``asked``: what the user asks for, or an empty string; rank 0's counts. An engine that was asked for and cannot
    serve is an error on all ranks. One that was not asked for is replaced by gloo, with a warning on rank 0.
    """
    size = len(ranks)
    if from_rank_0(store, rank, size, "engine proposed", lambda: _propose(ranks, asked)) == "gloo":
        return "gloo"
    store.set(f"engine/{rank}", mpi.lacks(ranks, rank))
    return from_rank_0(store, rank, size, "engine", lambda: _decide(_answers(store, size), bool(asked)))


def _propose(ranks: Sequence[int], asked: str) -> str:
    if asked not in ENGINES:
        raise ValueError(
            f"DIST_PRIMS_ENGINE={asked!r}: 'gloo' or 'mpi'; unset it to have MPI where mpirun started the ranks"
        )
    return asked or ("mpi" if _is_expected(ranks) else "gloo")


def _is_expected(ranks: Sequence[int]) -> bool:
    """Whether ranks like this one should use MPI: it is here, or a launcher of MPI has started them."""
    try:
        started = detect().medium == "MPI"
    except ValueError:  # no launcher is needed where the caller brings a store
        started = False
    return started or not mpi.lacks(ranks, 0)


def _answers(store: Any, size: int) -> Mapping[int, str]:
    """What the ranks that cannot use MPI lack."""
    answers = {each: store.get(f"engine/{each}").decode() for each in range(size)}
    return {each: answer for each, answer in answers.items() if answer}


def _decide(lacking: Mapping[int, str], is_asked: bool) -> str:
    if not lacking:
        return "mpi"
    if is_asked:
        raise RuntimeError(f"{_reason(lacking)}; to use gloo instead: DIST_PRIMS_ENGINE=gloo")
    again = "DIST_PRIMS_ENGINE=gloo asks for it without this warning"
    warnings.warn(f"{_reason(lacking)}; gloo carries them instead; {again}", stacklevel=4)
    return "gloo"


def _reason(lacking: Mapping[int, str]) -> str:
    """The first rank's, for the others mostly lack the same."""
    rank, reason = next(iter(lacking.items()))
    count = f", first of {len(lacking)} ranks" if len(lacking) > 1 else ""
    return f"MPI cannot carry the messages between the hosts of this group (rank {rank}{count}: {reason})"
