"""A plug-in of pytest: runs the tests that a file lists, in its order, and writes the first that fails beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

LIST = Path(os.environ["CHOSEN_TESTS"])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LIST.read_text().splitlines())}
    items[:] = sorted((item for item in items if item.nodeid in places), key=lambda item: places[item.nodeid])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    failed = LIST.with_suffix(".failed")
    if report.failed and not failed.exists():
        failed.write_text(report.nodeid)
