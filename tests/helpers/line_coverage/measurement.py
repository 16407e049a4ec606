"""The records of a measurement: which lines ran, and in which tests."""

from __future__ import annotations

import base64
import difflib
import functools
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Measurement", "Test"]

Line = tuple[str, int]  # file and number


class Test(NamedTuple):
    """A recorded test."""

    name: str  # empty: what ran between tests, such as imports
    seconds: float
    failed: bool


class Measurement:
    """What ``measure_lines.py run`` has left in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._table = json.loads((folder / "table.json").read_text())
        self.text: dict[str, list[str]] = self._table["text"]

    def executable(self) -> set[Line]:
        """The lines that could run: those for which there is code."""
        python = {(name, line) for name, entry in self._table["python"].items() for line in entry["lines"]}
        return python.union(*(lines for blocks in self._blocks.values() for lines in blocks.values()))

    @functools.cached_property
    def covered(self) -> set[Line]:
        """The lines that ran."""
        return self._lines_of(lambda test: True)

    @functools.cached_property
    def tested(self) -> set[Line]:
        """The lines that ran in a test, and not only at an import."""
        return self._lines_of(lambda test: bool(test.name))

    def _lines_of(self, is_wanted: Callable[[Test], bool]) -> set[Line]:
        marks: dict[str, set[int]] = defaultdict(set)
        for test, each in self._records():
            if is_wanted(test):
                for program, indices in each.items():
                    marks[program].update(indices)
        return {line for program, indices in marks.items() for index in indices for line in self._lines(program, index)}

    def tests(self) -> list[Test]:
        return [test for test, _ in self._records() if test.name]

    def tests_of(self, line: Line) -> list[Test]:
        """The tests that execute a line, the quickest first."""
        wanted: dict[str, set[int]] = {
            name: {at for at, lines in blocks.items() if line in lines} for name, blocks in self._blocks.items()
        }
        if line[0] in self._table["python"]:
            wanted["python"] = {self._table["python"][line[0]]["start"] + line[1]}
        found = {
            test
            for test, marks in self._records()
            if test.name and any(wanted.get(program, set()).intersection(each) for program, each in marks.items())
        }
        return sorted(found, key=lambda test: test.seconds)

    def _records(self) -> Iterator[tuple[Test, dict[str, list[int]]]]:
        for path in sorted(self._folder.glob("*/*.jsonl")):
            with path.open() as file:
                for record in map(json.loads, file):
                    marks = {program: _indices(text) for program, text in record["marks"].items()}
                    yield Test(record["test"], record["seconds"], record["failed"]), marks

    def _lines(self, program: str, index: int) -> set[Line]:
        return self._python_line(index) if program == "python" else self._blocks[program].get(index, set())

    def _python_line(self, index: int) -> set[Line]:
        starts, names = self._python_files
        position = int(np.searchsorted(starts, index, side="right")) - 1
        return {(names[position], index - starts[position])}

    @functools.cached_property
    def _python_files(self) -> tuple[list[int], list[str]]:
        entries = sorted((entry["start"], name) for name, entry in self._table["python"].items())
        return [start for start, _ in entries], [name for _, name in entries]

    @functools.cached_property
    def _blocks(self) -> dict[str, dict[int, set[Line]]]:
        return {
            library: {
                int(at): {(content["files"][file], line) for file, line in lines}
                for at, lines in content["blocks"].items()
            }
            for library, content in self._table["native"].items()
        }


def _indices(text: str) -> list[int]:
    steps: Any = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<u4")
    return np.cumsum(steps).tolist()  # type: ignore[no-any-return]


def percentages(measurement: Measurement) -> dict[str, tuple[int, int]]:
    """The covered and the executable lines, for the package and for csrc."""
    executable = measurement.executable()
    covered = measurement.covered & executable
    return {
        part: (sum(file.startswith(part) for file, _ in covered), sum(file.startswith(part) for file, _ in executable))
        for part in ("dist_prims/", "csrc/")
    }


def lost_lines(base: Measurement, new: Measurement) -> list[tuple[Line, str]]:
    """The lines that ``base`` covers, and that ``new`` has with the same text but does not cover: number in ``new``."""
    lost = []
    missing = new.executable() - new.covered
    for name in sorted(base.text.keys() & new.text.keys()):
        matcher = difflib.SequenceMatcher(None, base.text[name], new.text[name], autojunk=False)
        for before, after, size in matcher.get_matching_blocks():
            for step in range(1, size + 1):
                if (name, before + step) in base.covered and (name, after + step) in missing:
                    lost.append(((name, after + step), new.text[name][after + step - 1]))
    return lost
