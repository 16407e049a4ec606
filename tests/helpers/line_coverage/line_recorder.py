"""The plug-in of pytest that records which lines each test executes; see ``__main__.py``."""

from __future__ import annotations

import base64
import json
import mmap
import os
import time
import zlib
from pathlib import Path
from typing import Any

import line_marks  # type: ignore[import-not-found]  # in the folder of this file, which is a root of the program
import numpy as np
import pytest


def take(folder: str) -> dict[str, str]:
    """Return the marks since the last call, as text for each program, and clear them."""
    texts = {}
    for path in sorted(Path(folder).iterdir()):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            marks = np.frombuffer(memory, np.bool_)
            indices = np.flatnonzero(marks)
            marks[indices] = False
            del marks
        if len(indices):
            steps = np.diff(indices, prepend=0).astype("<u4")
            texts[path.stem] = base64.b64encode(zlib.compress(steps.tobytes())).decode()
    return texts


class Recorder:
    """The plug-in: appends one line to a file for each test. Leaves out the tests that an earlier run has recorded."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.failed = False

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        with open(os.path.join(os.path.dirname(self.folder), "done.txt")) as file:
            done = set(file.read().splitlines())
        items[:] = [item for item in items if item.nodeid not in done]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self.record("", 0.0)
        began, self.failed = time.monotonic(), False
        try:
            return (yield)
        finally:
            self.record(item.nodeid, time.monotonic() - began)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed |= report.failed

    def pytest_sessionfinish(self) -> None:
        self.record("", 0.0)

    def record(self, test: str, seconds: float) -> None:
        line = {"test": test, "seconds": round(seconds, 3), "failed": self.failed, "marks": take(self.folder)}
        if test or line["marks"]:
            with open(f"{self.folder}.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Give each worker of pytest-xdist a folder of its own, before it loads the package."""
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        folder = Path(os.environ[line_marks.VARIABLE]).with_name(worker)
        folder.mkdir()
        os.environ[line_marks.VARIABLE] = str(folder)
        line_marks.start()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(os.environ[line_marks.VARIABLE]), "recorder of lines")
