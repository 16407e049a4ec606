"""A plug-in of pytest: what tests cost, as seconds, processes and process groups, by folder and for the slowest tests.

A run of the whole default tier fails if a folder starts more processes, or makes more groups, than LIMITS says.

A process is counted when it is forked or started with ``subprocess``, by the test or by a process forked from it. A
group is counted once for each rank that makes it. Processes that run another program are not observed: a launcher
counts as one process.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed.distributed_c10d as c10d
from tiers import whole

# The most processes and groups of a folder in the default tier. Lower a limit when tests get cheaper.
LIMITS = {
    "tests/backend": (857, 2192),
    "tests/bench": (35, 60),
    "tests/cli": (17, 0),
    "tests/collectives": (75, 120),
    "tests/csrc": (5, 0),
    "tests/integration": (102, 165),
    "tests/launch": (170, 165),
    "tests/learn": (42, 0),
    "tests/models": (35, 44),
    "tests/ops": (24, 29),
    "tests/parallel": (26, 35),
    "tests/pipeline": (163, 740),
    "tests/project": (148, 235),
    "tests/repair": (228, 270),
    "tests/rendezvous": (21, 14),
    "tests/schedules": (50, 75),
    "tests/tracing": (80, 110),
    "tests/training": (800, 1540),
}
pytest_plugins = ["tiers"]  # whose options decide whether the limits hold
_SLOWEST = 20
_PROPERTY = "cost"


class Cost(NamedTuple):
    """What some tests cost."""

    tests: int = 0
    seconds: float = 0.0
    processes: int = 0
    groups: int = 0

    def plus(self, other: Cost) -> Cost:
        sums = (mine + theirs for mine, theirs in zip(self, other, strict=True))
        return Cost(*sums)  # type: ignore[arg-type]

    def row(self, name: str) -> str:
        return f"{self.seconds:9.1f} {self.tests:7} {self.processes:10} {self.groups:8}  {name}"


def too_many(folders: Mapping[str, Cost]) -> list[str]:
    """Return a line for each limit that a folder exceeds."""
    lines = []
    for folder, cost in sorted(folders.items()):
        for what, count, limit in zip(
            ("processes", "groups"), (cost.processes, cost.groups), LIMITS.get(folder, (0, 0)), strict=True
        ):
            if count > limit:
                lines.append(f"ERROR: the tests of {folder} cost {count} {what}; LIMITS in {__file__} allows {limit}")
    return lines


_HEADER = "  seconds   tests  processes   groups"


class _Counter:
    """Counts events of this process and of those forked from it: each appends a byte to a common file."""

    def __init__(self) -> None:
        file, path = tempfile.mkstemp()
        os.close(file)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.unlink(path)

    def add(self) -> None:
        os.write(self._file, b".")

    def total(self) -> int:
        return os.fstat(self._file).st_size

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with a count of its calls."""

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.add()
            return function(*args, **kwargs)

        return counted


class Costs:
    """Measures each test where it runs, and sums in the process that reports."""

    def __init__(self) -> None:
        self._processes, self._groups = _Counter(), _Counter()
        self._of_tests: dict[str, Cost] = {}
        self._too_many: list[str] = []
        os.register_at_fork(before=self._processes.add)
        popen: Any = subprocess.Popen
        popen._execute_child = self._processes.counting(popen._execute_child)
        c10d._new_process_group_helper = self._groups.counting(c10d._new_process_group_helper)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._before = self._processes.total(), self._groups.total()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if call.when == "teardown":
            processes, groups = self._before
            counts = self._processes.total() - processes, self._groups.total() - groups
            report.user_properties.append((_PROPERTY, counts))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        counts: Any = dict(report.user_properties).get(_PROPERTY, (0, 0))
        cost = Cost(int(report.when == "call"), report.duration, *counts)
        self._of_tests[report.nodeid] = self._of_tests.get(report.nodeid, Cost()).plus(cost)

    def _folders(self) -> dict[str, Cost]:
        folders: dict[str, Cost] = defaultdict(Cost)
        for test, cost in self._of_tests.items():
            folder = str(Path(test.partition("::")[0]).parent)
            folders[folder] = folders[folder].plus(cost)
        return folders

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.option.tier == "default" and whole(session.config):
            self._too_many = too_many(self._folders())
        if self._too_many and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        folders = self._folders()
        total = functools.reduce(Cost.plus, folders.values(), Cost())
        terminalreporter.section("costs by folder")
        terminalreporter.write_line(_HEADER)
        for folder, cost in sorted(folders.items(), key=lambda entry: -entry[1].seconds):
            terminalreporter.write_line(cost.row(folder))
        terminalreporter.write_line(total.row("all"))
        for line in self._too_many:
            terminalreporter.write_line(line)
        terminalreporter.section(f"the {_SLOWEST} slowest tests")
        for test, cost in sorted(self._of_tests.items(), key=lambda entry: -entry[1].seconds)[:_SLOWEST]:
            terminalreporter.write_line(cost.row(test))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(), "costs of tests")
