"""A storm of failures: ranks are killed, stopped and started at random moments while the others use their group.

    python -m tests.helpers.storm --events 100 --seed 1

Each process repeats: an all_reduce of numbers that tell who took part, checked against the members of the group; from
time to time ``grow``; after an error ``shrink``. The parent sends the signals, starts new processes, and fails if a sum
is wrong, if the group makes no progress for a while, or if a process has more descriptors and mappings at its end than
after its first steps.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gc
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dist_prims
from dist_prims.errors import CommError, LeftOutError

MOST, LEAST = 8, 2  # processes
STEP_LIMIT = 60.0  # seconds without progress
# Seconds: the timeout of a collective, and of shrink, on one host and on several. Between hosts no rank may be left out
# because the machine is slow: a majority of the registers must be left.
GROUP_TIMEOUTS, LATE = (2.0, 20.0), (0.6, 10.0)
# What a process may have more of each kind than after its first repair, when the group may have been small. Between
# hosts it has up to four connections with each other rank.
FOR_EACH_RANK = 3, 6


@dataclasses.dataclass
class Outcome:
    """What a storm has seen."""

    kills: int = 0
    stops: int = 0
    joins: int = 0
    steps: int = 0
    repairs: int = 0
    left_out: int = 0


def used() -> dict[str, int]:
    """The number of mappings of shared memory, and of descriptors of each kind."""
    gc.collect()  # errors and their frames may keep groups that were not made
    found = collections.Counter(mappings=Path("/proc/self/maps").read_text().count("memfd"))
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder
            found[re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{descriptor}"))] += 1
    return dict(found)


def run_rank(place: str, number: int, first: tuple[int, int, str] | None, hosts: int, reports: Connection) -> None:
    """The program of a process. ``first`` is its rank, the size and the store, if it belongs to the first group."""
    torch.set_num_threads(1)
    if hosts > 1:
        os.environ["DIST_PRIMS_HOST_ID"] = "abcdefgh"[number % hosts]
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    try:
        _steps(place, number, first, reports, hosts > 1)
    except LeftOutError:
        reports.send(("left out", number))
    except BaseException:
        reports.send(("failed", traceback.format_exc()))
        raise
    finally:
        os._exit(0)


def _steps(place: str, number: int, first: tuple[int, int, str] | None, reports: Connection, spans_hosts: bool) -> None:
    group_timeout, late = GROUP_TIMEOUTS[spans_hosts], LATE[spans_hosts]
    if first:
        rank, size, file = first
        timeout = dist.default_pg_timeout.__class__(seconds=group_timeout)
        dist.init_process_group(
            "dist_prims", store=dist.FileStore(file, size), rank=rank, world_size=size, timeout=timeout
        )
    else:
        dist_prims.join(place, timeout=120)
    shared, step = dist_prims.empty(70_000), 0
    before: dict[str, int] = {}
    while True:
        try:
            _check_sums(shared, number)
            if step % 10 == 0 and dist.get_world_size() < MOST:
                dist_prims.grow(place, timeout=group_timeout)
            step += 1
            reports.send(("step", number, dist.get_world_size(), os.getpid()))
        except LeftOutError:
            raise
        except CommError:
            _shrink(late)
            reports.send(("repair", number, dist.get_world_size(), os.getpid()))
            before = before or used()
        if before and step % 50 == 0:
            now = used()
            for kind, count in now.items():
                allowed = before.get(kind, 0) + FOR_EACH_RANK[spans_hosts] * MOST
                assert count <= allowed, f"{kind}: {before} after the first repair, now {now}"


def _shrink(late: float) -> None:
    try:
        dist_prims.shrink(timeout=late)
    except CommError as error:
        if "cannot reach a majority" in str(error):  # the others have gone on long ago
            raise LeftOutError(str(error)) from error
        raise


def _check_sums(shared: torch.Tensor, number: int) -> None:
    """One collective for each path: slots, large data, shared tensors."""
    size = dist.get_world_size()
    numbers = torch.zeros(size, dtype=torch.int64)
    numbers[dist.get_rank()] = number + 1
    dist.all_reduce(numbers)
    assert len({*numbers.tolist()} - {0}) == size, f"wrong members: {numbers}"
    expected = float(numbers.sum())
    for tensor in (shared, torch.empty(50_000)):
        dist.all_reduce(tensor.fill_(number + 1))
        assert (tensor == expected).all(), f"wrong sum: {tensor.unique()} instead of {expected}"


class Storm:
    """The parent: it starts the processes, and disturbs them."""

    def __init__(self, seed: int, hosts: int, folder: Path) -> None:
        self.random, self.hosts, self.folder = random.Random(seed), hosts, folder
        self.context = multiprocessing.get_context("fork")
        self.place = f"file://{folder}/place"
        self.started = 0
        self.processes: dict[int, tuple[Any, Connection]] = {}
        self.in_group: dict[int, float] = {}  # the time of the last report, of those that have made a step
        self.stopped: dict[int, float] = {}  # when they continue
        self.outcome = Outcome()

    def start(self, first: tuple[int, int, str] | None = None) -> None:
        number, self.started = self.started, self.started + 1
        ours, theirs = self.context.Pipe(duplex=False)
        arguments = (self.place, number, first, self.hosts, theirs)
        process = self.context.Process(target=run_rank, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self.processes[number] = process, ours

    def run(self, events: int, size: int = 4) -> Outcome:
        for rank in range(size):
            self.start((rank, size, f"{self.folder}/store"))
        progress = time.monotonic()
        done = 0
        try:
            while done < events:
                if self.read_reports(self.random.uniform(0.005, 0.25)):
                    progress = time.monotonic()
                assert time.monotonic() < progress + STEP_LIMIT, f"no progress after {done} events: {self.state()}"
                if not self.is_recovering():
                    done += self.disturb()
                elif len(self.processes) < LEAST + 3:
                    self.start()
            return self.outcome
        finally:
            for process, _ in self.processes.values():
                process.kill()
            for process, reports in self.processes.values():
                process.join(20)
                reports.close()

    def is_recovering(self) -> bool:
        """Whether fewer ranks make steps than there must be: another loss could end the job."""
        now = time.monotonic()
        alive = [number for number, when in self.in_group.items() if when > now - 0.5 and number not in self.stopped]
        return len(alive) < LEAST + 1 + (self.hosts > 1)

    def disturb(self) -> int:
        number = self.random.choice([*self.in_group])
        process, _ = self.processes[number]
        kind = self.random.choices(["kill", "stop", "join"], [2, 1, 2])[0]
        if kind == "join":
            if len(self.processes) >= MOST:
                return 0
            self.start()
            self.outcome.joins += 1
        elif number in self.stopped:
            return 0
        elif kind == "kill":
            process.kill()
            self.outcome.kills += 1
            self.in_group.pop(number)
        else:
            os.kill(process.pid, signal.SIGSTOP)
            self.stopped[number] = time.monotonic() + self.random.uniform(0.1, 4)
            self.outcome.stops += 1
        if self.hosts > 1:  # a majority of the registers must be left: the next event waits for steps after this one
            self.read_reports(0.3)
            self.in_group = dict.fromkeys(self.in_group, 0.0)
        return 1

    def read_reports(self, seconds: float) -> int:
        """Read what the processes report for a while; return the number of steps."""
        until, steps = time.monotonic() + seconds, 0
        while (left := until - time.monotonic()) > 0:
            for number, when in [*self.stopped.items()]:
                if time.monotonic() > when:
                    self.stopped.pop(number)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self.processes[number][0].pid, signal.SIGCONT)
            by_reports = {reports: number for number, (_, reports) in self.processes.items()}
            for ready in wait([*by_reports], min(left, 0.05)):
                steps += self.read(by_reports[ready], ready)
        return steps

    def read(self, number: int, reports: Any) -> int:
        try:
            kind, *rest = reports.recv()
        except (EOFError, OSError):
            process, _ = self.processes.pop(number)
            process.join(20)
            reports.close()
            self.in_group.pop(number, None)
            self.stopped.pop(number, None)
            return 0
        assert kind != "failed", f"process {number}:\n{rest[0]}"
        if kind == "left out":
            self.outcome.left_out += 1
            return 0
        self.in_group[number] = time.monotonic()
        if kind == "repair":
            self.outcome.repairs += 1
            return 0
        self.outcome.steps += 1
        return 1

    def state(self) -> str:
        return json.dumps(
            {
                "processes": {number: process.pid for number, (process, _) in self.processes.items()},
                "in the group": [*self.in_group],
                "stopped": [*self.stopped],
            }
        )


def storm(events: int, seed: int, hosts: int = 1) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return Storm(seed, hosts, Path(folder)).run(events)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=1)
    given = parser.parse_args()
    print(storm(given.events, given.seed, given.hosts))
    sys.exit(0)
