"""A storm of failures: ranks are killed, stopped and started, and hosts cut off, while the others use their group.

    python tests/helpers/storm.py --events 100 --seed 1
    ./launch_scripts/netns-hosts.sh 3 1 none --login -- python tests/helpers/storm.py --events 20 --hosts 3 --cuts

Each process repeats: an all_reduce of numbers that tell who took part, checked against the members of the group; from
time to time ``grow``; after an error ``shrink``. The parent sends the signals, cuts the links of hosts, starts new
processes, and fails if

- a sum is wrong,
- two groups that have taken the place of the same group make steps: one group would have become two,
- the group makes no progress for a while,
- a process has more descriptors and mappings at its end than after its first steps.

The parent disturbs only what a group must survive: a majority of the ranks that serve registers is left. At least one
event in ten is of each kind, on a slow machine as well: what may be disturbed depends on time, not on the seed alone.
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
from storm_hosts import NamedHosts, NamespaceHosts

import dist_prims
from dist_prims.backend.create import made_group
from dist_prims.backend.quorum_ranks import quorum_ranks
from dist_prims.errors import CommError, LeftOutError

MOST, LEAST = 8, 2  # processes
KINDS = {"kill": 4, "stop": 3, "join": 3, "cut": 3}  # of events, and how often each is tried
STEP_LIMIT = 60.0  # seconds without progress
JOIN_LIMIT = 600.0  # seconds for a new process, since many attempts fail while the group is disturbed all the time


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds."""

    collective: float  # the timeout of the group
    shrink: float
    stop: float  # the longest stop of a process
    cut: float = 0.0  # the longest cut of a host


ON_ONE_HOST = Times(collective=1.0, shrink=0.6, stop=2.0)
# Between hosts no rank may be left out because the machine is slow: a majority of the registers must be left.
ON_NAMED_HOSTS = Times(collective=20.0, shrink=10.0, stop=2.0)
# Here a cut must cost seconds. Some cuts and stops are shorter than the timeout, and others longer.
ON_NAMESPACES = Times(collective=3.0, shrink=4.0, stop=4.0, cut=14.0)

# What a process may have more of each kind than after its first repair, when the group may have been small. Between
# hosts it has up to four connections with each other rank.
FOR_EACH_RANK = 3, 6


@dataclasses.dataclass
class Outcome:
    """What a storm has done, and what its processes have reported."""

    kills: int = 0
    stops: int = 0
    cuts: int = 0
    joins: int = 0
    steps: int = 0
    repairs: int = 0
    left_out: int = 0

    def of_kind(self, kind: str) -> int:
        return int(getattr(self, kind + "s"))

    def events(self) -> int:
        return sum(map(self.of_kind, KINDS))


@dataclasses.dataclass(frozen=True)
class RankProcess:
    """What a process of a storm is given."""

    number: int
    place: str  # where new ranks join
    hosts: NamedHosts
    host: int
    times: Times
    first: tuple[int, int, str] | None  # its rank, the size and the store, if it belongs to the first group


def used() -> dict[str, int]:
    """The number of mappings of shared memory, and of descriptors of each kind."""
    gc.collect()  # errors and their frames may keep groups that were not made
    found = collections.Counter(mappings=Path("/proc/self/maps").read_text().count("memfd"))
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder
            found[re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{descriptor}"))] += 1
    return dict(found)


def run_rank(own: RankProcess, reports: Connection) -> None:
    """The program of a process."""
    torch.set_num_threads(1)
    try:
        own.hosts.enter(own.host)
        _steps(own, reports)
    except LeftOutError:
        reports.send(("left out",))
    except BaseException:
        reports.send(("failed", traceback.format_exc()))
        raise
    finally:
        os._exit(0)


def _steps(own: RankProcess, reports: Connection) -> None:
    if own.first:
        rank, size, file = own.first
        timeout = dist.default_pg_timeout.__class__(seconds=own.times.collective)
        dist.init_process_group(
            "dist_prims", store=dist.FileStore(file, size), rank=rank, world_size=size, timeout=timeout
        )
    else:
        dist_prims.join(own.place, timeout=JOIN_LIMIT)
    shared, step = dist_prims.empty(70_000), 0
    before: dict[str, int] = {}
    while True:
        try:
            members = _check_sums(shared, own.number)
            name = dist.distributed_c10d._get_default_group().group_name
            reports.send(("step", name, made_group(name).attempt, members))
            if step % 5 == 0 and dist.get_world_size() < MOST:
                dist_prims.grow(own.place, timeout=own.times.collective)
            step += 1
        except LeftOutError:
            raise
        except CommError:
            _shrink(own.times.shrink)
            reports.send(("repair",))
            before = before or used()
        if before and step % 50 == 0:
            now = used()
            for kind, count in now.items():
                allowed = before.get(kind, 0) + FOR_EACH_RANK[own.hosts.count > 1] * MOST
                assert count <= allowed, f"{kind}: {before} after the first repair, now {now}"


def _shrink(late: float) -> None:
    try:
        dist_prims.shrink(timeout=late)
    except CommError as error:
        if "cannot reach a majority" in str(error):  # it is cut off, or the others have gone on long ago
            raise LeftOutError(str(error)) from error
        raise


def _check_sums(shared: torch.Tensor, number: int) -> list[int]:
    """One collective for each path: slots, large data, shared tensors. Return the members of the group."""
    size = dist.get_world_size()
    numbers = torch.zeros(size, dtype=torch.int64)
    numbers[dist.get_rank()] = number + 1
    dist.all_reduce(numbers)
    assert len({*numbers.tolist()} - {0}) == size, f"wrong members: {numbers}"
    expected = float(numbers.sum())
    for tensor in (shared, torch.empty(50_000)):
        dist.all_reduce(tensor.fill_(number + 1))
        assert (tensor == expected).all(), f"wrong sum: {tensor.unique()} instead of {expected}"
    return (numbers - 1).tolist()


class Storm:
    """The parent: it starts the processes, and disturbs them."""

    def __init__(self, seed: int, hosts: NamedHosts, folder: Path) -> None:
        self.random, self.hosts, self.folder = random.Random(seed), hosts, folder
        self.times = ON_NAMESPACES if hosts.can_be_cut else ON_NAMED_HOSTS if hosts.count > 1 else ON_ONE_HOST
        self.context = multiprocessing.get_context("fork")
        self.started = 0
        self.processes: dict[int, tuple[Any, Connection]] = {}
        self.host_of: dict[int, int] = {}
        self.in_group: dict[int, float] = {}  # the time of the last report, of those that have made a step
        self.killed: set[int] = set()
        self.stopped: dict[int, float] = {}  # when they continue
        self.cut: dict[int, float] = {}  # hosts, and when their links are mended
        self.successors: dict[str, tuple[str, list[int]]] = {}  # the group that has taken the place of each one
        self.members: list[int] = []  # of the last group
        self.most = MOST
        self.progress = time.monotonic()
        self.outcome = Outcome()

    def start(self, first: tuple[int, int, str] | None = None) -> None:
        number, self.started = self.started, self.started + 1
        on_host = collections.Counter(self.host_of[each] for each in self.processes)
        reached = [host for host in range(self.hosts.count) if host not in self.cut]
        host = min(reached, key=lambda host: (on_host[host], self.random.random()))
        ours, theirs = self.context.Pipe(duplex=False)
        own = RankProcess(number, f"file://{self.folder}/place", self.hosts, host, self.times, first)
        process = self.context.Process(target=run_rank, args=(own, theirs), daemon=True)
        process.start()
        theirs.close()
        self.processes[number] = process, ours
        self.host_of[number] = host
        self.outcome.joins += first is None

    def run(self, events: int, size: int = 4) -> Outcome:
        for rank in range(size):
            self.start((rank, size, f"{self.folder}/store"))
        self.progress = time.monotonic()
        try:
            while kinds := self.kinds_to_try(events):
                self.let_go_on()
                if not self.is_recovering():
                    self.disturb(kinds)
            self.expect_steps()
            while self.is_recovering():
                self.let_go_on()
            return self.outcome
        finally:
            for process, _ in self.processes.values():
                process.kill()
            for process, reports in self.processes.values():
                process.join(20)
                reports.close()

    def kinds_to_try(self, events: int) -> dict[str, int]:
        """The kinds of events that may come next, with their weights; none when the storm is over."""
        kinds = {kind: weight for kind, weight in KINDS.items() if kind != "cut" or self.hosts.can_be_cut}
        if self.outcome.events() < events:
            return kinds
        rare = {kind for kind in kinds if self.outcome.of_kind(kind) < max(1, events // 10)}
        # No process joins while there are enough of them, unless some are killed.
        return {kind: weight for kind, weight in kinds.items() if kind in rare or (kind == "kill" and "join" in rare)}

    def let_go_on(self) -> None:
        """Read reports for a random while; start processes if there are too few."""
        if self.read_reports(self.random.uniform(0.005, 0.15)):
            self.progress = time.monotonic()
        assert time.monotonic() < self.progress + STEP_LIMIT, f"no progress after {self.outcome}: {self.state()}"
        if self.is_recovering() and len(self.processes) < LEAST + 3 + self.hosts.can_be_cut:  # two ranks on each host
            self.start()

    def is_recovering(self) -> bool:
        """Whether fewer ranks make steps than there must be: another loss could end the job."""
        now = time.monotonic()
        alive = [number for number, when in self.in_group.items() if when > now - 0.5 and number not in self.stopped]
        return len(alive) < LEAST + 1 + (self.hosts.count > 1)

    def expect_steps(self) -> None:
        """The group is recovering until it makes steps that begin after this call."""
        self.read_reports(0.3)
        self.in_group = dict.fromkeys(self.in_group, 0.0)

    def may_lose(self, lost: set[int]) -> bool:
        """Whether the group must go on if it loses these processes too: see the table in docs/repair.md."""

        def is_left(number: int) -> bool:
            is_away = number in lost or number in self.stopped or self.host_of[number] in self.cut
            return number in self.in_group and not is_away

        hosts = [str(self.host_of[number]) for number in self.members]
        servers = [self.members[rank] for rank in quorum_ranks(hosts)] if len({*hosts}) > 1 else []
        has_majority = not servers or 2 * sum(map(is_left, servers)) > len(servers)
        return has_majority and sum(map(is_left, self.members)) >= LEAST

    def disturb(self, kinds: dict[str, int]) -> None:
        """Do something to a random process or host, if the group must survive it."""
        [kind] = self.random.choices([*kinds], [*kinds.values()])
        if kind == "join":
            if len(self.processes) >= self.most:
                self.most = self.random.randint(LEAST + 4, MOST)  # so that there are small groups as well
                return
            self.start()
        elif kind == "cut":
            host = self.host_of[self.random.choice([*self.processes])]
            if self.cut or not self.may_lose({each for each in self.members if self.host_of[each] == host}):
                return
            self.hosts.cut(host)
            # Every second cut is so long that the others go on without the host.
            shortest, longest = ((0.1, 0.6), (0.8, 1.0))[self.outcome.cuts % 2]
            self.cut[host] = time.monotonic() + self.times.cut * self.random.uniform(shortest, longest)
            self.outcome.cuts += 1
        elif not self.harm(self.random.choice([*self.in_group]), kind):
            return
        if self.hosts.count > 1:  # a majority of the registers must be left: the next event waits for steps
            self.expect_steps()

    def harm(self, number: int, kind: str) -> bool:
        """Kill or stop a process, and return whether it was done."""
        process, _ = self.processes[number]
        if number in self.stopped or not self.may_lose({number}):
            return False
        if kind == "kill":
            process.kill()
            self.outcome.kills += 1
            self.killed.add(number)
            self.in_group.pop(number)
        else:
            os.kill(process.pid, signal.SIGSTOP)
            self.stopped[number] = time.monotonic() + self.random.uniform(0.1, self.times.stop)
            self.outcome.stops += 1
        return True

    def read_reports(self, seconds: float) -> int:
        """Read what the processes report for a while; return the number of steps."""
        until, steps = time.monotonic() + seconds, 0
        while (left := until - time.monotonic()) > 0:
            self.end_disturbances()
            by_reports: dict[Any, int] = {reports: number for number, (_, reports) in self.processes.items()}
            for ready in wait([*by_reports], min(left, 0.05)):
                steps += self.read(by_reports[ready], ready)
        return steps

    def end_disturbances(self) -> None:
        """Continue processes and mend links whose time has come."""
        now = time.monotonic()
        for number in [number for number, when in self.stopped.items() if now > when]:
            self.stopped.pop(number)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[number][0].pid, signal.SIGCONT)
        for host in [host for host, when in self.cut.items() if now > when]:
            self.cut.pop(host)
            self.hosts.mend(host)

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
        if number not in self.killed:  # what it has reported before
            self.in_group[number] = time.monotonic()
        if kind == "repair":
            self.outcome.repairs += 1
            return 0
        self.note_group(*rest)
        self.outcome.steps += 1
        return 1

    def note_group(self, name: str, attempt: str, members: list[int]) -> None:
        """A group has made a step. Only one may take the place of the one before, whose attempt its name contains."""
        predecessor = name.partition(" after ")[2]
        only = self.successors.setdefault(predecessor, (attempt, members))
        assert only == (attempt, members), f"two groups after {predecessor or 'none'}: {only} and {(attempt, members)}"
        if attempt[:8] not in self.successors:
            self.members = members

    def state(self) -> str:
        return json.dumps(
            {
                "processes": {number: process.pid for number, (process, _) in self.processes.items()},
                "hosts": {number: self.host_of[number] for number in self.processes},
                "in the group": [*self.in_group],
                "last group": self.members,
                "stopped": [*self.stopped],
                "cut": [*self.cut],
            }
        )


def storm(events: int, seed: int, hosts: int = 1, cuts: bool = False) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return Storm(seed, NamespaceHosts(hosts) if cuts else NamedHosts(hosts), Path(folder)).run(events)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--cuts", action="store_true", help="the hosts are those of netns-hosts.sh --login")
    given = parser.parse_args()
    print(json.dumps(dataclasses.asdict(storm(given.events, given.seed, given.hosts, given.cuts))))
    sys.exit(0)
