"""A plug-in of pytest: the tiers of the tests, and the seed of random tests.

    pytest                           tests marked neither ``slow`` nor ``long``; some cases of those marked ``sampled``
    pytest --all                     all tests but those marked ``long``
    pytest --long                    the tests marked ``long``
    pytest --long --slice MINUTES    some of them, drawn by the seed, whose declared minutes sum to at most MINUTES
    pytest --smoke                   what other versions of torch are tested with
    pytest FILE::TEST                this test, whatever its tier

``sampled(cases)``: the default tier and the smoke tier have this number of the test's parametrized cases, the last case
and, if the number is above 1, the first among them. ``long(minutes)`` declares what one case costs on 2 quiet cores. A
random test takes its seed from the fixture ``random_seed``: that of ``--seed``, by default one of the day. The summary
prints the seed, and a failure the command that repeats it.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import random
from collections import defaultdict
from typing import Any

import pytest

SMOKE = (
    "backend/test_backend.py",
    "backend/test_native_libraries.py",
    "repair/test_shrink.py",
    "repair/test_shrink_group.py",
    "repair/test_grow.py",
    "repair/test_grow_failures.py",
    "repair/test_grow_hosts.py",
    "collectives/test_collectives.py",
    "training/test_gradients.py",
    "pipeline/test_pipeline.py",
    "project/test_package.py",
)
NEEDS_ANOTHER_TORCH = "this torch"  # so begin the reasons of tests that are skipped for the version of torch
_RECORD = "dist_prims/skipped"  # in the cache of pytest
_TORCH = importlib.metadata.version("torch")  # whose import would take seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers of the tests")
    group.addoption("--all", action="store_const", dest="tier", const="all", default="default", help="all but long")
    group.addoption("--long", action="store_const", dest="tier", const="long", help="the tests marked long")
    group.addoption("--smoke", action="store_const", dest="tier", const="smoke", help="for another torch")
    group.addoption("--slice", type=float, metavar="MINUTES", help="with --long: draw tests of so many minutes")
    group.addoption("--seed", type=int, help="of random tests and of the slice; by default one of the day")


def minutes(item: pytest.Item) -> float | None:
    """What ``item`` declares to cost, or None if it is not long."""
    mark = item.get_closest_marker("long")
    return None if mark is None else float(mark.kwargs["minutes"])


def needs_another_torch(item: pytest.Item) -> bool:
    """Whether ``item`` has a condition on the version of torch, true or not."""
    reasons = (mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif"))
    return any(reason.startswith(NEEDS_ANOTHER_TORCH) for reason in reasons)


def in_tier(item: pytest.Item, tier: str) -> bool:
    is_long, is_slow = minutes(item) is not None, item.get_closest_marker("slow") is not None
    if tier == "long" or is_long:
        return tier == "long" and is_long
    if tier == "smoke":
        return needs_another_torch(item) or (not is_slow and item.path.as_posix().endswith(SMOKE))
    return tier == "all" or not is_slow


def sample(items: list[pytest.Item]) -> list[pytest.Item]:
    """Leave out cases of tests that are marked ``sampled``: the cases that stay are evenly spaced."""
    cases: dict[tuple[Any, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[item.path, item.parent, item.name.partition("[")[0]].append(item)
    left_out = set[pytest.Item]()
    for of_test in cases.values():
        mark = of_test[0].get_closest_marker("sampled")
        assert mark is not None
        left_out.update(of_test)
        left_out.difference_update(evenly_spaced(of_test, mark.args[0]))
    return [item for item in items if item not in left_out]


def evenly_spaced(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """``count`` of the cases, or all if there are fewer."""
    if count >= len(cases):
        return cases
    return [cases[-1]] if count == 1 else [cases[index * (len(cases) - 1) // (count - 1)] for index in range(count)]


def draw(costs: dict[str, float], limit: float, seed: int) -> set[str]:
    """Draw names, by the seed alone, whose costs sum to at most ``limit``."""
    names, drawn, total = sorted(costs), set(), 0.0
    random.Random(seed).shuffle(names)
    for name in names:
        if total + costs[name] <= limit:
            drawn.add(name)
            total += costs[name]
    return drawn


def whole(config: pytest.Config) -> bool:
    """Whether this process runs, or distributes, all tests of a tier."""
    if hasattr(config, "workerinput") or config.args_source != pytest.Config.ArgsSource.TESTPATHS:
        return False
    parts = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "slice", "collectonly")
    return not any(getattr(config.option, name, None) for name in parts)


class Tiers:
    """Selects the tests of a tier, and reports the seed."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.option
        self._tier, self._slice, self._named = option.tier, option.slice, any("::" in arg for arg in config.args)
        if option.seed is None:  # workers of xdist receive the number
            option.seed = int(f"{datetime.datetime.now(datetime.timezone.utc):%Y%m%d}")
        self._seed: int = option.seed
        self._skipped: dict[str, str] = {}  # with the reason
        self._ran: set[str] = set()
        self._record: Any = None  # what the last run of all tests skipped, with another torch

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            if "random_seed" in getattr(item, "fixturenames", ()) and minutes(item) is None:
                raise pytest.UsageError(f"{item.nodeid} uses random_seed, which is for tests marked long")
        if self._named:
            return
        selected = [item for item in items if in_tier(item, self._tier)]
        if self._tier in ("default", "smoke"):
            selected = sample(selected)
        if self._slice is not None:
            costs = {item.nodeid: minutes(item) or 0.0 for item in selected}
            drawn = draw(costs, self._slice, self._seed)
            selected = [item for item in selected if item.nodeid in drawn]
        kept = set(selected)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = selected

    @pytest.fixture
    def random_seed(self) -> int:
        return self._seed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if report.failed and "random_seed" in getattr(item, "fixturenames", ()):
            command = f"./launch_scripts/test.sh '{item.nodeid}' --seed {self._seed}"
            report.sections.append(("seed", f"{self._seed}; to repeat the failure: {command}"))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skipped[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")
        elif report.when == "call":
            self._ran.add(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        cache = getattr(session.config, "cache", None)
        if cache is None or not whole(session.config):
            return
        if self._tier == "all":
            cache.set(_RECORD, {"torch": _TORCH, "skipped": self._skipped})
        elif self._tier == "smoke":
            record = cache.get(_RECORD, None)
            self._record = record if record and record["torch"] != _TORCH else None
        if self._record and self._missing() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _missing(self) -> list[str]:
        """Tests that the other torch skipped for its version, and that this tier does not have."""
        skipped: dict[str, str] = self._record["skipped"]
        needed = {test for test, reason in skipped.items() if reason.startswith(NEEDS_ANOTHER_TORCH)}
        return sorted(needed - self._ran - self._skipped.keys())

    def _compare(self, terminalreporter: pytest.TerminalReporter) -> None:
        ran = sorted(self._ran & self._record["skipped"].keys())
        terminalreporter.section(f"torch {_TORCH} ran {len(ran)} tests that {self._record['torch']} skips")
        for test in ran:
            terminalreporter.write_line(test)
        for test in self._missing():
            terminalreporter.write_line(f"ERROR: not in the smoke tier: {test}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._record:
            self._compare(terminalreporter)
        part = "" if self._slice is None else f", a slice of {self._slice:g} minutes"
        terminalreporter.write_line(f"tier: {self._tier}{part}; seed: {self._seed}")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.slice is not None and config.option.tier != "long":
        raise pytest.UsageError("--slice draws from the long tests: pass --long too")
    config.pluginmanager.register(Tiers(config), "tiers of tests")
