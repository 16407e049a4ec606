"""Ranks in processes of their own, which go on when one of them dies; for tests of what the survivors see.

    outcomes = run_ranks(body, 3, tmp_path)  # body(rank) on each, in a group of the backend "dist_prims"

    first, second = run_worlds([(body, 3), (other, 2)], tmp_path)  # at once, each in a default group of its own

An outcome is what the body returned, the exception that it raised, or, of a rank that has ended without either, its
status.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_names = iter(range(1_000_000))


def run_ranks(
    body: Callable[[int], Any], size: int, folder: Path, *, join: bool = True, group_timeout: float = 60
) -> list[Any]:
    """Ranks live until all of them have an outcome; after 100 seconds the test fails."""
    (outcomes,) = run_worlds([(body, size)], folder, join=join, group_timeout=group_timeout)
    return outcomes


def run_worlds(
    worlds: Sequence[tuple[Callable[[int], Any], int]], folder: Path, *, join: bool = True, group_timeout: float = 60
) -> list[list[Any]]:
    """The outcomes of several worlds, each given by the body and the number of its ranks, which run at the same time:
    the limits of all of them expire while one expires."""
    context = multiprocessing.get_context("fork")
    places = []
    for body, size in worlds:
        meeting = f"file://{folder}/meeting{next(_names)}" if join else ""
        places += [(body, rank, size, meeting, group_timeout) for rank in range(size)]
    pairs = [context.Pipe() for _ in places]
    ranks = [
        context.Process(target=_rank, args=(*place, number, pairs), daemon=True) for number, place in enumerate(places)
    ]
    try:
        for rank in ranks:
            rank.start()
        for _, theirs in pairs:
            theirs.close()
        deadline = time.monotonic() + 100
        outcomes = iter([_outcome(rank, ours, deadline) for rank, (ours, _) in zip(ranks, pairs, strict=True)])
        return [[next(outcomes) for _ in range(size)] for _, size in worlds]
    finally:
        for ours, _ in pairs:
            ours.close()
        for rank in ranks:
            rank.kill()
            rank.join(20)


def join_at_rank_0(rank: int, size: int, folder: Path, backend: str = "dist_prims") -> None:
    """Join the default group by a TCPStore that rank 0 keeps: it needs no descriptors later, and ends with rank 0."""
    port = folder / "port"
    if rank == 0:
        store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "new").write_text(str(store.port))
        (folder / "new").rename(port)
    else:
        deadline = time.monotonic() + 60
        while not port.exists():
            assert time.monotonic() < deadline, "rank 0 has no store"
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))


@contextlib.contextmanager
def store_process() -> Iterator[int]:
    """A TCPStore in a process of its own, which outlives every rank; yield its port."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    try:
        assert ours.poll(60), "the store has not started"
        yield ours.recv()
    finally:
        server.kill()
        server.join(20)


def _serve(answers: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers.send(store.port)
    with contextlib.suppress(EOFError):
        answers.recv()  # ended by store_process


def _rank(
    body: Callable[[int], Any],
    rank: int,
    size: int,
    meeting: str,
    group_timeout: float,
    number: int,
    pairs: list[tuple[Connection, Connection]],
) -> None:
    for other, (ours, theirs) in enumerate(pairs):
        ours.close()
        if other != number:
            theirs.close()  # its end is to be seen when that rank dies
    answers = pairs[number][1]
    torch.set_num_threads(1)
    # torch names groups by this count, which a fork of a process that had groups inherits. Ranks that have destroyed
    # their groups count from 0 again, and would not meet the others.
    dist.distributed_c10d._world.group_count = 0
    try:
        if meeting:
            timeout = timedelta(seconds=group_timeout)
            dist.init_process_group("dist_prims", init_method=meeting, rank=rank, world_size=size, timeout=timeout)
        outcome = body(rank)
    except Exception as error:
        traceback.print_exc()
        outcome = error
    answers.send(outcome)
    with contextlib.suppress(EOFError, ConnectionError):
        answers.recv()  # the end of the test
    os._exit(0)


def _outcome(rank: Any, answers: Connection, deadline: float) -> Any:
    assert answers.poll(max(0.0, deadline - time.monotonic())), f"{rank.name} has no outcome in time"
    try:
        return answers.recv()
    except EOFError:
        rank.join(20)
        return rank.exitcode
