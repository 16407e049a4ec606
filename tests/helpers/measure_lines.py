"""Line coverage of the package and of csrc.

    python tests/helpers/measure_lines.py run FOLDER [arguments of pytest]
    python tests/helpers/measure_lines.py report FOLDER
    python tests/helpers/measure_lines.py compare BASE NEW

``run`` runs tests in a copy of the working tree (build/line-coverage), whose libraries are compiled without
optimization and with marks, and prints both percentages. FOLDER receives the lines that each test executes. The same
command again continues an interrupted run, without the tests that have passed according to FOLDER. ``compare`` lists
the lines that only the first measurement covers, even if other lines of the file have changed in between.

Coverage.py and gcov keep their counts in the memory of each process and write them at its exit; here, hundreds of tests
kill ranks. So a trace function (``python_marks.c``) and the compiled code (``native_marks.cpp``) set a byte in mapped
files, which outlive a process without any action of its own. Lines are not observed in threads that C++ starts and
that call Python.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from line_coverage import program
from line_coverage.measurement import Measurement, lost_lines, percentages

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="measure_lines.py")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "report"):
        commands.add_parser(name).add_argument("folder", type=Path)
    compare = commands.add_parser("compare")
    compare.add_argument("base", type=Path)
    compare.add_argument("new", type=Path)
    arguments, of_pytest = parser.parse_known_args()
    if arguments.command == "compare":
        base, new = Measurement(arguments.base), Measurement(arguments.new)
        report(base)
        report(new)
        for (name, number), text in lost_lines(base, new):
            print(f"lost {name}:{number}: {text}")
        return 0
    status = run(arguments.folder.absolute(), of_pytest) if arguments.command == "run" else 0
    report(Measurement(arguments.folder))
    return status


def run(folder: Path, arguments: list[str], source: Path = ROOT) -> int:
    """Run tests of the copy and record their lines; return the status of pytest."""
    copy = source / "build" / "line-coverage"
    table = program.build(source, copy)
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "table.json"
    if known.exists() and known.read_bytes() != table.read_bytes():
        raise SystemExit(f"{folder} has records of other sources; give another folder")
    shutil.copy(table, known)
    slot = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    done = [test.name for test in Measurement(folder).tests() if not test.failed]
    (slot / "done.txt").write_text("\n".join(done) + "\n")
    (slot / "main").mkdir()
    binaries = copy / ".venv" / "bin"
    environment = {**os.environ, "LINE_COVERAGE": str(slot / "main"), "PATH": f"{binaries}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    command = [str(binaries / "python"), "-m", "pytest", "-p", "line_recorder", *arguments]
    try:
        return subprocess.run(command, cwd=copy, env=environment, check=False).returncode
    finally:
        for marks in slot.glob("*/*.marks"):
            marks.unlink()


def report(measurement: Measurement) -> None:
    tests = measurement.tests()
    print(f"{len(tests)} tests, of which {sum(test.failed for test in tests)} failed")
    for part, (covered, executable) in percentages(measurement).items():
        print(f"{part:12} {covered:6} of {executable} lines: {100 * covered / executable:.2f} %")


if __name__ == "__main__":
    sys.exit(main())
