"""Events of collectives that run in Python in the trace of this process: the group, and each call."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ..torch_compat import default_group, group_store
from ..tracing import clock, recorder
from ..tracing import format as fmt
from .call import Call

__all__: list[str] = []

_TOKEN = "dist_prims/trace"


@contextmanager
def in_group(group: dist.ProcessGroup, counter: str, sequence: int = 0) -> Iterator[None]:
    """Context in which the events of this thread belong to a call of a group.

    ``counter`` names what numbers the calls, such as "python" or "pipeline"; ``sequence`` is the number.
    """
    here = recorder.context
    outer = here.where
    number = recorder.group_number(group, counter, lambda: _describe(group, counter))
    here.where = number, sequence, -1  # no step yet
    try:
        yield
    finally:
        here.where = outer


def traced(run: Callable[[], None], call: Call, sequence: int, algorithm: str) -> None:
    """Run a collective, and record it.

    Args:
        run: runs the collective.
        call: what it runs.
        sequence: the number of the call in its group.
        algorithm: the algorithm with its parameters.
    """
    with in_group(call.group, "python", sequence):
        begin, failed = recorder.started(), True
        try:
            run()
            failed = False
        finally:
            facts: dict[str, Any] = {"collective": fmt.COLLECTIVES.index(call.collective), "failed": failed}
            peer = -1 if call.root is None else call.root
            recorder.record(fmt.COLLECTIVE, begin, name=algorithm, nbytes=call.nbytes, peer=peer, **facts)


def _describe(group: dist.ProcessGroup, counter: str) -> dict[str, Any]:
    ranks, token = dist.get_process_group_ranks(group), _token(group)
    return {"name": str(group.group_name), "counter": counter, "token": token, "rank": group.rank(), "ranks": ranks}


def _token(group: dist.ProcessGroup) -> str:
    """A text that the ranks of a group share, by which a reader of their traces recognises the group.

    It is the text of the first rank that has stored one in the group's store; empty without a store.
    """
    if dist.get_world_size() > 1 and (world := group_store(default_group())) is not None:
        clock.register(world, dist.get_rank())
    store = group_store(group)
    try:
        return store.compare_set(_TOKEN, "", secrets.token_hex(8)).decode() if store is not None else ""
    except RuntimeError:  # a store without compare_set, or one that has ended
        return ""
