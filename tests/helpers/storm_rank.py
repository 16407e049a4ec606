"""The program of a process of a storm of failures (storm.py): steps, a repair after each error, and reports."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import os
import re
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from storm_hosts import NamedHosts

import dist_prims
from dist_prims.backend.create import made_group
from dist_prims.errors import CommError, LeftOutError

MOST = 8  # processes
JOIN_LIMIT = 600.0  # seconds for a new process, since many attempts fail while the group is disturbed all the time

# What a process may have more of each kind than after its first repair, when the group may have been small. Between
# hosts it has up to four connections with each other rank.
FOR_EACH_RANK = 3, 6

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds."""

    collective: float  # the timeout of the group
    shrink: float
    stop: float  # the longest stop of a process
    cut: float = 0.0  # the longest fault of a link


@dataclasses.dataclass(frozen=True)
class RankProcess:
    """What a process of a storm is given."""

    number: int
    place: str  # where new ranks join
    hosts: NamedHosts
    host: int
    times: Times
    first: tuple[int, int, str] | None  # its rank, the size and the store, if it belongs to the first group


@dataclasses.dataclass(frozen=True)
class Blame:
    """The addresses that an error blames: of late and dead ranks, and of both ends of links that do not deliver."""

    text: str
    ranks: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


def used() -> dict[str, int]:
    """The number of mappings of shared memory, and of descriptors of each kind; nothing if no descriptor is left."""
    gc.collect()  # errors and their frames may keep groups that were not made
    try:
        found = collections.Counter(mappings=Path("/proc/self/maps").read_text().count("memfd"))
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return {}
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # the descriptor of the folder
            found[re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{descriptor}"))] += 1
    return dict(found)


def run_rank(own: RankProcess, reports: Connection) -> None:
    """The program of a process."""
    torch.set_num_threads(1)
    try:
        own.hosts.enter(own.host)
        _Rank(own, reports).run()
    except LeftOutError as error:
        reports.send(("left out", str(error)))
    except BaseException:
        reports.send(("failed", traceback.format_exc()))
        raise
    finally:
        os._exit(0)


class _Rank:
    def __init__(self, own: RankProcess, reports: Connection) -> None:
        self.own, self.reports = own, reports
        self.waited: dict[str, float] = {}  # the longest call of each kind since the last report, in seconds

    def run(self) -> None:
        self.join()
        self.report_group()
        shared, step = dist_prims.empty(70_000), 0
        before: dict[str, int] = {}
        while True:
            try:
                members, turn = self.check_sums(shared, step)
                self.report("step", *_name_and_attempt(), members)
                if turn % 5 == 0 and dist.get_world_size() < MOST:
                    self.timed("grow", self.grow)
                step += 1
            except LeftOutError:
                raise
            except (OSError, RuntimeError) as error:  # also CommError
                if not isinstance(error, CommError) and "Too many open files" not in str(error):  # in grow()
                    raise
                self.report("error", _blame(error))
                self.shrink()
                self.report("repair")
                self.report_group()
                before = before or used()
            if before and step % 50 == 0:
                now = used()
                for kind, count in now.items():
                    allowed = before.get(kind, 0) + FOR_EACH_RANK[self.own.hosts.count > 1] * MOST
                    assert count <= allowed, f"{kind}: {before} after the first repair, now {now}"

    def join(self) -> None:
        if not self.own.first:
            dist_prims.join(self.own.place, timeout=JOIN_LIMIT)
            return
        rank, size, file = self.own.first
        timeout = dist.default_pg_timeout.__class__(seconds=self.own.times.collective)
        dist.init_process_group(
            "dist_prims", store=dist.FileStore(file, size), rank=rank, world_size=size, timeout=timeout
        )

    def report(self, *what: Any) -> None:
        self.reports.send((*what, self.waited))
        self.waited = {}

    def report_group(self) -> None:
        addresses = made_group(_name_and_attempt()[0]).addresses
        self.report("group", addresses[dist.get_rank()] if addresses else "")

    def timed(self, kind: str, call: Callable[[], T]) -> T:
        began = time.monotonic()
        try:
            return call()
        finally:
            self.waited[kind] = max(self.waited.get(kind, 0.0), time.monotonic() - began)

    def grow(self) -> None:
        dist_prims.grow(self.own.place, timeout=self.own.times.collective)

    def shrink(self) -> None:
        try:
            self.timed("shrink", lambda: dist_prims.shrink(timeout=self.own.times.shrink))
        except CommError as error:
            # It is cut off, or the others have gone on long ago; or it cannot take part.
            if re.search("cannot reach a majority|this process has no file descriptor left", str(error)):
                raise LeftOutError(str(error)) from error
            raise

    def check_sums(self, shared: torch.Tensor, step: int) -> tuple[list[int], int]:
        """One collective for each path: slots, large data, shared tensors, and messages between all ranks. Return the
        members of the group, and the step of rank 0."""
        size, number = dist.get_world_size(), self.own.number
        sums = torch.zeros(size + 1, dtype=torch.int64)
        sums[dist.get_rank()] = number + 1
        sums[size] = 0 if dist.get_rank() else step
        self.timed("call", lambda: dist.all_reduce(sums))
        numbers = sums[:size]
        assert len({*numbers.tolist()} - {0}) == size, f"wrong members: {numbers}"
        expected = float(numbers.sum())
        for tensor in (shared, torch.empty(50_000)):
            tensor.fill_(number + 1)
            self.timed("call", lambda tensor=tensor: dist.all_reduce(tensor))  # type: ignore[misc]
            assert (tensor == expected).all(), f"wrong sum: {tensor.unique()} instead of {expected}"
        received = torch.empty(size * 5_000)
        self.timed("call", lambda: dist.all_to_all_single(received, torch.full_like(received, number + 1)))
        assert (received.view(size, -1) == numbers[:, None]).all(), f"wrong blocks: {received.unique()}"
        return (numbers - 1).tolist(), int(sums[size])


def _name_and_attempt() -> tuple[str, str]:
    name = dist.distributed_c10d._get_default_group().group_name
    return name, made_group(name).attempt


def _blame(error: Exception) -> Blame:
    group = dist.distributed_c10d._get_default_group()
    backend: Any = group._get_backend(torch.device("cpu"))
    addresses = made_group(group.group_name).addresses
    ranks, links = (backend.named_ranks(), backend.cut_links()) if addresses else ([], [])
    return Blame(
        f"{type(error).__name__} {error}",
        tuple(addresses[rank] for rank in ranks),
        tuple((addresses[one], addresses[other]) for one, other in links),
    )
