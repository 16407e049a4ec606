"""The measurement of line coverage: tests/helpers/line_coverage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from line_coverage import program
from line_coverage.measurement import Measurement, lost_lines, percentages

PYTHON = """\
import ctypes, os, signal, sys, threading
library = ctypes.CDLL(sys.argv[1])
def die(positive):
    if positive:
        library.twice(1)
    else:
        library.twice(-1)
    os.kill(os.getpid(), signal.SIGKILL)
if (child := os.fork()) == 0:
    thread = threading.Thread(target=die, args=(1,))
    thread.start(), thread.join()
os.waitpid(child, 0)
"""
CPP = """\
extern "C" int twice(int number) {
    if (number < 0)
        return -1;
    return 2 * number;
}
"""


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """The folder of a measurement of a small project, in which a forked process executes lines and kills itself."""
    site, work, package, csrc = (tmp_path / name for name in ("site", "work", "dist_prims", "csrc"))
    for folder in (site, package / "lib", csrc, work / "run" / "main"):
        folder.mkdir(parents=True)
    (package / "small.py").write_text(PYTHON)
    (csrc / "small.cpp").write_text(CPP)
    compiler, library = str(program.compiler(work)), str(package / "lib" / "small.so")
    subprocess.run([compiler, "-fPIC", "-c", str(csrc / "small.cpp"), "-o", str(work / "small.o")], check=True)
    subprocess.run([compiler, "-shared", str(work / "small.o"), "-o", library], check=True)
    program.install(site)
    program.write_table(tmp_path, site, work)
    environment = {"LINE_COVERAGE": str(work / "run" / "main"), "PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"}
    start = f"import line_marks, runpy; runpy.run_path({str(package / 'small.py')!r})"
    subprocess.run([sys.executable, "-c", start, library], env=environment, check=True)
    take = f"import json, line_recorder; print(json.dumps(line_recorder.take({str(work / 'run' / 'main')!r})))"
    marks = subprocess.run([sys.executable, "-c", take], env={"PYTHONPATH": str(site)}, capture_output=True, check=True)
    record = {"test": "kill", "seconds": 1.0, "failed": False, "marks": json.loads(marks.stdout)}
    (work / "run" / "main.jsonl").write_text(json.dumps(record) + "\n")
    return work


@pytest.mark.slow
def test_the_lines_of_a_process_that_is_killed_are_not_lost(measured: Path) -> None:
    """They were lost with tools that write at the exit of a process; threads were not observed at first."""
    measurement = Measurement(measured)
    missing = measurement.executable() - measurement.covered
    assert missing == {("dist_prims/small.py", 7), ("csrc/small.cpp", 3)}
    assert {("dist_prims/small.py", 5), ("dist_prims/small.py", 8), ("csrc/small.cpp", 4)} <= measurement.covered
    assert [test.name for test in measurement.tests_of(("csrc/small.cpp", 4))] == ["kill"]
    assert not measurement.tests_of(("csrc/small.cpp", 3))
    assert percentages(measurement) == {"dist_prims/": (10, 11), "csrc/": (4, 5)}


@pytest.mark.slow
def test_a_lost_line_is_found_although_its_number_has_changed(measured: Path) -> None:
    base, new = Measurement(measured), Measurement(measured)
    new.text["csrc/small.cpp"] = ["// another line", *new.text["csrc/small.cpp"]]
    new.covered = {line for line in base.covered if line[0] != "csrc/small.cpp"}
    new.executable = lambda: {("csrc/small.cpp", 5)}  # type: ignore[method-assign]
    assert lost_lines(base, new) == [(("csrc/small.cpp", 5), "    return 2 * number;")]
