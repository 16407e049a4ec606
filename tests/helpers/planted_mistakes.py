"""Planted mistakes: do the tests notice them?

    python tests/helpers/planted_mistakes.py plan MISTAKES COVERAGE [--seed 1] [--count 24]
    python tests/helpers/planted_mistakes.py check MISTAKES COVERAGE [--tree TREE] [--only 3 7]

``plan`` writes mistakes into the folder MISTAKES as diffs, one in each package and in each folder of csrc before any
has two; sources, coverage and seed fix them. ``check`` applies each to a copy of TREE (default: this working tree;
the copy is in build/planted), compiles csrc if it is concerned, and runs the tests that execute the line, the quickest
first, until one fails or the limit is over. COVERAGE is the folder of ``measure_lines.py run`` for TREE.

A test counts only if it passes without the mistake, which is tried each time. The results are kept beside the diffs,
in a file for each tree: a second call of ``check`` goes on with the mistakes that have none.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from line_coverage.measurement import Measurement
from planting.choice import choose
from planting.mistake import Mistake, read_mistake
from planting.planted_copy import PlantedCopy

ROOT = Path(__file__).parents[2]
LIMIT = 360  # seconds for the tests of one mistake


@dataclass
class Result:
    """What the tests of one tree say about one mistake."""

    number: str
    kind: str
    place: str
    tests: int  # that execute the line
    verdict: str
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="planted_mistakes.py")
    commands = parser.add_subparsers(dest="command", required=True)
    plan, check = commands.add_parser("plan"), commands.add_parser("check")
    for command in (plan, check):
        command.add_argument("mistakes", type=Path)
        command.add_argument("coverage", type=lambda folder: Measurement(Path(folder)))
    plan.add_argument("--seed", type=int, default=1)
    plan.add_argument("--count", type=int, default=24)
    check.add_argument("--tree", type=Path, default=ROOT)
    check.add_argument("--only", nargs="+", type=int, default=[])
    check.add_argument("--limit", type=float, default=LIMIT)
    arguments = parser.parse_args()
    if arguments.command == "plan":
        write_plan(arguments.mistakes, arguments.coverage, arguments.seed, arguments.count)
    else:
        numbers = [f"{number:02}" for number in arguments.only]
        diffs = [diff for diff in sorted(arguments.mistakes.glob("*.diff")) if not numbers or diff.stem[:2] in numbers]
        check_all(diffs, arguments.coverage, arguments.tree.absolute(), arguments.limit)


def write_plan(folder: Path, coverage: Measurement, seed: int, count: int) -> None:
    mistakes = choose(ROOT, count, seed, lambda file, line: (file, line) in coverage.tested, compiles)
    folder.mkdir(parents=True)
    for number, mistake in enumerate(mistakes, 1):
        part = "-".join(mistake.file.split("/")[:2]).removesuffix(".py")
        diff = folder / f"{number:02}-{part}-{mistake.edit.kind.replace(' ', '-')}.diff"
        diff.write_text(mistake.diff(ROOT))
        print(diff.name)


def compiles(mistake: Mistake) -> bool:
    """Whether the sources of csrc that may include the file compile with the mistake."""
    if mistake.file.endswith(".py"):
        return True
    site = Path(sysconfig.get_path("purelib"))
    headers = [site / folder for folder in ("torch/include", "torch/include/torch/csrc/api/include", "libucx/include")]
    headers += [Path(sysconfig.get_path("include")), Path(sys.prefix, "include")]  # of Python and MPI
    flags = ['-DBUILT_FOR_TORCH=""', *(f"-isystem{folder}" for folder in headers)]
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(ROOT / "csrc", Path(copy, "csrc"))
        file = Path(copy, mistake.file)
        file.write_text(mistake.text(ROOT))
        own = file.with_suffix(".cpp")
        sources = [own] if own.exists() else sorted(file.parent.glob("*.cpp"))
        if "/torch/" in mistake.file:
            sources = [Path(copy, "csrc/torch/adapter.cpp")]
        command = ["c++", "-std=c++20", "-fsyntax-only", *flags]
        return all(subprocess.run([*command, str(each)], capture_output=True).returncode == 0 for each in sources)


def check_all(diffs: list[Path], coverage: Measurement, tree: Path, limit: float) -> None:
    """Check the mistakes that have no result yet, and print all results."""
    results = diffs[0].parent / f"results-{tree.name}.jsonl"
    known = {}
    if results.exists():
        known = {each["number"]: Result(**each) for each in map(json.loads, results.read_text().splitlines())}
    copy = None
    for diff in diffs:
        number = diff.stem[:2]
        if number not in known:
            copy = copy or PlantedCopy(tree, tree / "build" / "planted")
            known[number] = check_one(diff, coverage, copy, limit)
            with results.open("a") as file:
                file.write(json.dumps(asdict(known[number])) + "\n")
        result = known[number]
        row = f"{number} {result.kind:17} {result.place:55} {result.tests:5} tests {result.seconds:5.0f} s"
        print(row, result.verdict, flush=True)


def check_one(diff: Path, coverage: Measurement, copy: PlantedCopy, limit: float) -> Result:
    """Plant one mistake, and run the tests that execute its line until one fails that passes without it."""
    kind, name = read_mistake(diff)
    number = diff.stem[:2]
    before = (copy.folder / name).read_text()
    if problem := copy.plant(diff, name):
        return Result(number, kind, name, 0, problem, 0.0)
    line = first_difference(before, (copy.folder / name).read_text())
    tests = list(dict.fromkeys(test.name for test in coverage.tests_of((name, line))))
    verdict, unsound = "not caught", []
    began = time.monotonic()
    deadline = began + limit
    while failed := copy.first_failure([test for test in tests if test not in unsound], deadline - time.monotonic()):
        copy.restore(diff, name)
        if copy.first_failure([failed], limit) == "":
            verdict = f"caught by {failed}"
            break
        unsound.append(failed)
        copy.plant(diff, name)
    else:
        verdict += " within the limit" if failed is None else ""
        copy.restore(diff, name)
    if unsound:
        verdict += f"; fails without the mistake too: {', '.join(unsound)}"
    return Result(number, kind, f"{name}:{line}", len(tests), verdict, time.monotonic() - began)


def first_difference(old: str, new: str) -> int:
    """The number of the first line that differs."""
    pairs = zip(old.splitlines(), new.splitlines(), strict=True)
    return next(number for number, (before, after) in enumerate(pairs, 1) if before != after)


if __name__ == "__main__":
    main()
