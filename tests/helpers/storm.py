"""A storm of failures: ranks are killed, stopped and started, and hosts and links fail, while they use their group.

    python tests/helpers/storm.py --events 100 --seed 1
    ./launch_scripts/netns-hosts.sh 3 1 none --login -- python tests/helpers/storm.py --hosts 3 --kinds join cut

Each process (storm_rank.py) repeats a *step*: collectives of numbers that tell which ranks took part, checked against
the members of the group. From time to time it calls ``grow``, and after an error ``shrink``. It reports each step,
error and repair to the parent through a pipe. The parent sends signals, lets the links of hosts fail (storm_hosts.py),
starts new processes, and fails if

- a sum is wrong,
- two groups that have taken the place of the same group make steps: one group would have become two,
- a call takes longer than its timeout and 5 s,
- an error blames, or ``shrink`` leaves out, a rank or a link that nothing has happened to,
- the group makes no progress for a while,
- a process has more descriptors and mappings at its end than after its first steps.

The parent disturbs only what a group must survive: a majority of the ranks that serve registers is left. At least one
event in 20 is of each kind, on a slow machine as well: what may be disturbed depends on time, not on the seed alone.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from storm_hosts import Fault, NamedHosts, NamespaceHosts
from storm_rank import MOST, Blame, RankProcess, Times, run_rank

from dist_prims.backend.quorum_ranks import quorum_ranks

LEAST = 2  # processes that are left
STEP_LIMIT = 60.0  # seconds without a step of any process
MARGIN = 5.0  # seconds that a call may take in addition to its timeout
DUE_TIME = 3.0  # seconds for which an event is tried while processes join

ON_ONE_HOST = Times(collective=1.0, shrink=0.6, stop=2.0)
# Between hosts no rank may be left out because the machine is slow: a majority of the registers must be left.
ON_NAMED_HOSTS = Times(collective=20.0, shrink=10.0, stop=2.0)
# Here the fault of a link must cost seconds. Some of the faults and stops are shorter than the timeout, others longer.
ON_NAMESPACES = Times(collective=3.0, shrink=4.0, stop=4.0, cut=10.0)

# The kinds of events, and how often each is tried.
PROCESS_KINDS = {"kill": 4, "stop": 3, "join": 3}
# These need network namespaces. cut: packets of a host vanish; vanish: and its processes die; block: two hosts cannot
# reach each other; limit: large packets vanish; slow: a slow link; starve: a process cannot open descriptors.
LINK_KINDS = {"cut": 3, "vanish": 1, "block": 3, "limit": 2, "slow": 1, "starve": 2}


@dataclasses.dataclass
class Outcome:
    """What a storm has done, and what its processes have reported."""

    done: dict[str, int]  # the number of events of each kind
    steps: int = 0
    repairs: int = 0
    left_out: int = 0  # processes without which the others have gone on

    def events(self) -> int:
        return sum(self.done.values())


class Storm:
    """The parent: it starts the processes, disturbs them, and checks their reports. A process has a number."""

    def __init__(self, seed: int, hosts: NamedHosts, kinds: Iterable[str], folder: Path) -> None:
        self.seed, self.random, self.hosts, self.folder = seed, random.Random(seed), hosts, folder
        self.times = ON_NAMESPACES if hosts.have_links else ON_NAMED_HOSTS if hosts.count > 1 else ON_ONE_HOST
        self.kinds = {kind: (PROCESS_KINDS | LINK_KINDS)[kind] for kind in kinds}
        self.context = multiprocessing.get_context("fork")
        self.started = 0  # processes
        self.processes: dict[int, tuple[Any, Connection]] = {}  # those that have not ended, and where they report
        self.host_of: dict[int, int] = {}  # of all processes
        self.number_at: dict[str, int] = {}  # by the address that a process has in its groups
        self.in_group: dict[int, float] = {}  # processes that have reported, and the time of their last step
        self.killed: set[int] = set()
        self.faults: list[Fault] = []  # of now
        self.past_faults: list[Fault] = []
        self.blamed_hosts: dict[int, float] = {}  # the ends of links that errors have blamed, and when
        self.successors: dict[str, tuple[str, list[int]]] = {}  # attempt and members of the group after each attempt
        self.members: list[int] = []  # processes of the last group, by rank
        self.most = MOST  # processes now
        self.due, self.due_until = "", 0.0  # the kind of the next event, and until when it is tried
        self.began = self.progress = time.monotonic()  # progress: the time of the last step
        self.outcome = Outcome(dict.fromkeys(self.kinds, 0))
        self.log: list[str] = []

    def note(self, text: str) -> None:
        self.log.append(f"{time.monotonic() - self.began:8.2f} s, event {self.outcome.events()}: {text}")

    def start(self, first: tuple[int, int, str] | None = None) -> None:
        """Start a process on the host with the fewest. ``first``: see RankProcess."""
        number, self.started = self.started, self.started + 1
        count_on = collections.Counter(self.host_of[running] for running in self.processes)
        failing = {host for fault in self.faults for host in fault.hosts}
        reached = [host for host in range(self.hosts.count) if host not in failing]
        host = min(reached, key=lambda host: (count_on[host], self.random.random()))
        reports, to_parent = self.context.Pipe(duplex=False)
        rank_process = RankProcess(number, f"file://{self.folder}/place", self.hosts, host, self.times, first)
        process = self.context.Process(target=run_rank, args=(rank_process, to_parent), daemon=True)
        process.start()
        to_parent.close()
        self.processes[number] = process, reports
        self.host_of[number] = host
        self.note(f"process {number} starts on host {host}")
        self.outcome.done["join"] += first is None

    def run(self, events: int) -> Outcome:
        for rank in range(4):
            self.start((rank, 4, f"{self.folder}/store"))
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
        except AssertionError as error:
            self.note_last_reports()
            raise AssertionError("\n".join((*self.log[-60:], f"seed {self.seed}: {error}"))) from error
        finally:
            for process, _ in self.processes.values():
                process.kill()
            for process, reports in self.processes.values():
                process.join(20)
                reports.close()

    def note_last_reports(self) -> None:
        for number, (_, reports) in self.processes.items():
            with contextlib.suppress(EOFError, OSError):
                while reports.poll(0.3):
                    kind, *rest = reports.recv()
                    if kind not in ("step", "group"):
                        self.note(f"process {number} {kind}: {rest}"[:1000])

    def kinds_to_try(self, events: int) -> dict[str, int]:
        """The kinds of events that may come next, with their weights; none when the storm is over."""
        if self.outcome.events() < events:
            return self.kinds
        rare = {kind for kind in self.kinds if self.outcome.done[kind] < max(1, events // 20)}
        # They may need ranks on a host that has none: then others are killed and join. Otherwise no process joins,
        # since that would delay faults of hosts.
        if rare and len({self.host_of[number] for number in self.processes}) < self.hosts.count:
            rare |= {"kill", "join"} & self.kinds.keys()
        return {kind: weight for kind, weight in self.kinds.items() if kind in rare}

    def let_go_on(self) -> None:
        """Read reports for a random while; start processes if there are too few."""
        if self.read_reports(self.random.uniform(0.005, 0.15)):
            self.progress = time.monotonic()
        assert time.monotonic() < self.progress + STEP_LIMIT, f"no progress after {self.outcome}: {self.state()}"
        if self.is_recovering() and len(self.processes) < LEAST + 3 + self.hosts.have_links:  # two ranks on each host
            self.start()

    def is_recovering(self) -> bool:
        """Whether so few ranks make steps that another loss could end the job."""
        now = time.monotonic()
        alive = [number for number, when in self.in_group.items() if when > now - 0.5 and not self.is_away(number)]
        return len(alive) < LEAST + 1 + (self.hosts.count > 1)

    def expect_steps(self) -> None:
        """The group is recovering until it makes steps that begin after this call."""
        self.read_reports(0.3)
        self.in_group = dict.fromkeys(self.in_group, 0.0)

    def is_away(self, number: int) -> bool:
        """Whether the others may go on without this process because of what happens to it now."""
        return any(number in fault.processes or self.host_of[number] in fault.hosts for fault in self.faults)

    def may_lose(self, lost: Iterable[int]) -> bool:
        """Whether the group must go on if it loses these processes too: see the table in docs/repair.md."""
        left = {number for number in self.in_group if not self.is_away(number)} - {*lost}
        hosts = [str(self.host_of[number]) for number in self.members]
        servers = [self.members[rank] for rank in quorum_ranks(hosts)] if len({*hosts}) > 1 else []
        has_majority = not servers or 2 * len(left & {*servers}) > len(servers)
        return has_majority and len(left & {*self.members}) >= LEAST

    def joining(self) -> set[int]:
        return {*self.processes} - {*self.members} - self.killed

    def disturb(self, kinds: dict[str, int]) -> None:
        """Do something to a random process or host, if the group must survive it."""
        if self.due not in kinds or not self.joining() or time.monotonic() > self.due_until:
            [self.due] = self.random.choices([*kinds], [*kinds.values()])
            self.due_until = time.monotonic() + DUE_TIME
        kind = self.due
        if kind == "join":
            self.due = ""
            if len(self.processes) >= self.most:
                self.most = self.random.randint(LEAST + 4, MOST)  # so that there are small groups as well
                return
            self.start()
        else:
            is_of_process = kind in ("kill", "stop", "starve")
            if not (self.harm(self.random.choice([*self.in_group]), kind) if is_of_process else self.harm_hosts(kind)):
                return
            self.outcome.done[kind] += 1
        self.due = ""
        if self.hosts.count > 1:  # a majority of the registers must be left: the next event waits for steps
            self.expect_steps()

    def harm(self, number: int, kind: str) -> bool:
        """Kill a process, stop it, or take its descriptors away, and return whether it was done."""
        process, _ = self.processes[number]
        if self.is_away(number) or not self.may_lose({number}):
            return False
        self.note(f"{kind} process {number}")
        if kind == "kill":
            self.kill({number})
            return True
        end: Callable[[], object]
        if kind == "stop":
            os.kill(process.pid, signal.SIGSTOP)
            longest, end = self.times.stop, lambda: os.kill(process.pid, signal.SIGCONT)
        else:
            limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            free = {*range(1000)} - {*map(int, os.listdir(f"/proc/{process.pid}/fd"))}
            few = sorted(free)[self.random.randint(0, 3)]  # a new descriptor must be below the limit
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (few, limits[1]))
            longest, end = self.times.cut, lambda: resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
        self.add_fault(kind, self.random.uniform(0.1, longest), end, processes=frozenset({number}))
        return True

    def harm_hosts(self, kind: str) -> bool:
        """Let the links of a host fail, or of two, and return whether it was done."""
        hosts = sorted({self.host_of[number] for number in self.members})
        count = 2 if kind == "block" else 1
        # With the processes that join, other ranks serve the registers.
        if len(hosts) < count or self.joining() or any(fault.hosts for fault in self.faults):
            return False
        ends = self.random.sample(hosts, count)
        on_hosts = [{member for member in self.members if self.host_of[member] == host} for host in ends]
        if not all(map(self.may_lose, on_hosts)):
            return False
        mend, text = self.hosts.fail(kind, ends, self.random)
        # Every second fault is so long that the others go on without the host.
        shortest, longest = ((0.1, 0.6), (0.8, 1.0))[self.outcome.done[kind] % 2]
        seconds = self.times.cut * self.random.uniform(shortest, longest)
        self.note(f"{kind} hosts {ends} for {seconds:.1f} s: {text}")
        self.add_fault(kind, seconds, mend, hosts=frozenset(ends))
        if kind == "vanish":
            self.kill({number for number in self.processes if self.host_of[number] in ends})
        return True

    def kill(self, numbers: set[int]) -> None:
        for number in numbers:
            self.processes[number][0].kill()
            self.in_group.pop(number, None)
        self.killed |= numbers

    def add_fault(self, kind: str, seconds: float, end: Callable[[], object], **where: frozenset[int]) -> None:
        """Note a fault of ``processes`` or ``hosts``, which ``end()`` ends after a time."""
        now = time.monotonic()
        self.faults.append(Fault(kind, now, now + seconds, end, **where))

    def end_faults(self) -> None:
        """Continue processes and mend links whose time has come."""
        now = time.monotonic()
        for fault in [fault for fault in self.faults if now > fault.until]:
            with contextlib.suppress(ProcessLookupError):
                fault.end()
            self.note(f"end of {fault.kind} {[*fault.processes, *fault.hosts]}")
            self.faults.remove(fault)
            self.past_faults.append(dataclasses.replace(fault, until=time.monotonic()))

    def recent_faults(self) -> list[Fault]:
        """What may still show in an error: TCP repeats packets at growing intervals."""
        now, late = time.monotonic(), self.times.collective + MARGIN
        return [fault for fault in self.faults + self.past_faults if now < 2 * fault.until - fault.began + late]

    def shown_faults(self, number: int, kinds: Iterable[str] = LINK_KINDS.keys() | PROCESS_KINDS) -> list[Fault]:
        """What has happened to a process or its host, and may still show."""
        of_kinds = [fault for fault in self.recent_faults() if fault.kind in kinds]
        return [fault for fault in of_kinds if number in fault.processes or self.host_of[number] in fault.hosts]

    def read_reports(self, seconds: float) -> int:
        """Read what the processes report for a while; return the number of steps."""
        until, steps = time.monotonic() + seconds, 0
        while (left := until - time.monotonic()) > 0:
            self.end_faults()
            by_reports: dict[Any, int] = {reports: number for number, (_, reports) in self.processes.items()}
            for ready in wait([*by_reports], min(left, 0.05)):
                steps += self.read(by_reports[ready], ready)
        return steps

    def read(self, number: int, reports: Any) -> int:
        """Read and check one report of a process; return 1 if it is a step, else 0.

        A report is a kind, what belongs to it, and the seconds in each kind of call; the last one ends with an error.
        """
        # 1. The process has ended, has failed, or is left out.
        try:
            kind, *rest, waited = reports.recv()
        except (EOFError, OSError):
            process, _ = self.processes.pop(number)
            process.join(20)
            reports.close()
            self.in_group.pop(number, None)
            self.note(f"process {number} has ended")
            return 0
        assert kind != "failed", f"process {number}:\n{waited}"
        if kind == "left out":
            self.outcome.left_out += 1
            self.note(f"process {number} is left out: {waited}")
            # Of the two hosts at the ends of a link that an error has blamed, either may be left out.
            is_blamed = self.blamed_hosts.get(self.host_of[number], 0.0) > time.monotonic() - self.times.shrink - MARGIN
            is_harmed = number in self.killed or is_blamed or self.shown_faults(number)
            assert is_harmed, f"a healthy process, {number}, is left out"
            return 0
        # 2. It reports the address in its new group, an error, a repair or a step.
        self.check_times(number, waited)
        if kind == "group":
            self.number_at[rest[0]] = number
        elif kind == "error":
            self.check_blame(number, rest[0])
        if number not in self.killed:  # a report from before the kill does not count
            # Between hosts only a step counts: a further loss during a repair may be one of a majority.
            self.in_group.setdefault(number, 0.0)
            if kind == "step" or self.hosts.count == 1:
                self.in_group[number] = time.monotonic()
        if kind == "repair":
            self.note(f"process {number} goes on after {waited}")
            self.outcome.repairs += 1
        if kind == "step":
            self.note_group(*rest)
            self.outcome.steps += 1
        return int(kind == "step")

    def check_times(self, number: int, waited: dict[str, float]) -> None:
        limits = {"call": self.times.collective, "grow": self.times.collective, "shrink": self.times.shrink}
        for call, seconds in waited.items():
            is_long = seconds > limits[call] + MARGIN and not self.shown_faults(number, ["stop"])
            assert not is_long, f"process {number} waited {seconds:.1f} s in {call}"

    def check_blame(self, number: int, blame: Blame) -> None:
        """Assert that something has happened to the ranks and the links that an error blames."""
        self.note(f"process {number}: {blame.text[:300]}")
        if self.shown_faults(number, ["cut", "vanish"]):  # its connections lead nowhere
            return
        for address in blame.ranks:
            other = self.number_at.get(address, number)
            is_gone = other in self.killed or other not in self.processes
            faults = self.shown_faults(other, {*self.kinds} - {"block"})
            assert other == number or is_gone or faults, f"a healthy process, {other}, is blamed by {number}"
        words = "cannot be reached from|has not replied to"
        for ends in re.findall(rf"on host host(\d+) (?:{words}) rank \d+ on host host(\d+)", blame.text):
            hosts = {*map(int, ends)}
            faults = [fault for fault in self.recent_faults() if fault.hosts & hosts]
            is_faulty = any(fault.kind != "block" or fault.hosts == hosts for fault in faults)
            assert is_faulty, f"a link that delivers, between the hosts {hosts}, is blamed by process {number}"
            self.blamed_hosts.update(dict.fromkeys(hosts, time.monotonic()))

    def note_group(self, name: str, attempt: str, members: list[int]) -> None:
        """A group has made a step. Only one may take the place of the one before, whose attempt its name contains."""
        predecessor = name.partition(" after ")[2]
        only = self.successors.setdefault(predecessor, (attempt, members))
        assert only == (attempt, members), f"two groups after {predecessor or 'none'}: {only} and {(attempt, members)}"
        if attempt[:8] not in self.successors:
            self.members = members

    def state(self) -> str:
        """The state, for the error."""
        processes = {number: (process.pid, self.host_of[number]) for number, (process, _) in self.processes.items()}
        faults = [(fault.kind, *fault.processes, *fault.hosts) for fault in self.faults]
        return f"pids and hosts {processes}, in a group {[*self.in_group]}, members {self.members}, faults {faults}"


def storm(events: int, seed: int, hosts: int = 1, kinds: Iterable[str] = PROCESS_KINDS) -> Outcome:
    where = NamespaceHosts(hosts) if LINK_KINDS.keys() & {*kinds} else NamedHosts(hosts)
    with tempfile.TemporaryDirectory(dir=where.folder) as folder:
        return Storm(seed, where, kinds, Path(folder)).run(events)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=[*PROCESS_KINDS], help="with links: for netns-hosts.sh --login")
    print(json.dumps(dataclasses.asdict(storm(**vars(parser.parse_args())))))
    sys.exit(0)
