"""The part of a collective in Python in the trace of this process: its group, and the call itself."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ..torch_compat import default_group, group_store
from ..tracing import clock, recorder
from ..tracing import format as fmt

__all__: list[str] = []

_TOKEN = "dist_prims/trace"


@contextmanager
def in_group(group: dist.ProcessGroup, counter: str, sequence: int = 0) -> Iterator[None]:
    """Context in which the events of this thread belong to a call of a group. ``counter``: what numbers the calls."""
    here = recorder.context
    outer = here.where
    here.where = _number_of(group, counter), sequence, -1
    try:
        yield
    finally:
        here.where = outer


def traced(
    run: Callable[[], None],
    group: dist.ProcessGroup,
    sequence: int,
    collective: str,
    algorithm: str,
    nbytes: int,
    root: int | None,
) -> None:
    """Run a collective, and record it."""
    with in_group(group, "python", sequence):
        begin, failed = recorder.started(), True
        try:
            run()
            failed = False
        finally:
            facts: dict[str, Any] = {"collective": fmt.COLLECTIVES.index(collective), "failed": failed}
            recorder.record(
                fmt.COLLECTIVE, begin, name=algorithm, nbytes=nbytes, peer=-1 if root is None else root, **facts
            )


def _number_of(group: dist.ProcessGroup, counter: str) -> int:
    return recorder.group_number(group, counter, lambda: _describe(group, counter))


def _describe(group: dist.ProcessGroup, counter: str) -> dict[str, Any]:
    ranks = dist.get_process_group_ranks(group)
    return {
        "name": str(group.group_name),
        "counter": counter,
        "token": _token(group),
        "rank": group.rank(),
        "ranks": ranks,
    }


def _token(group: dist.ProcessGroup) -> str:
    """A text that the ranks of a group share: the text of the first rank that has stored one. Empty without a store."""
    if dist.get_world_size() > 1 and (world := group_store(default_group())) is not None:
        clock.register(world, dist.get_rank())
    store = group_store(group)
    try:
        return store.compare_set(_TOKEN, "", secrets.token_hex(8)).decode() if store is not None else ""
    except RuntimeError:  # a store without compare_set, or one that has ended
        return ""
