"""PyTorch's own tests of a ``torch.distributed`` backend, run against any backend: one line a test.

The tests ship in the torch wheel, in ``torch.testing._internal.distributed.distributed_test``. Run as they are, they
are skipped for a backend of another name than the built-in ones. Here the gates of gloo and MPI are opened for it.
Each test has a session and a folder of its own: at its deadline the session is killed, and the folder is removed, so
that a test which hangs costs its own time and nothing else.

    python tests/integration/conformance/run.py --backend dist_prims --ranks 4

The exit status is 0 if every test passed or was skipped, save those that ``--expect`` lists. GPUs are hidden: what is
tested are CPU tensors. Needs ``expecttest``, which the tests of PyTorch import.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import unittest
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "torch.testing._internal.distributed.distributed_test"
PASSING = ("passed", "skipped")
GATES = frozenset({"gloo", "mpi"})
ERROR = re.compile(r"[\w.]*(Error|Exception|Exit|Timeout|Died|Left)\b.*: ")  # the last line of a traceback

# The gates compare names while the module is loaded, hence two of its lines are read otherwise.
CHANGED = {
    'BACKEND = os.environ["BACKEND"]': "BACKEND = GIVEN_BACKEND",
    "if BACKEND not in backends:": "if not any(BACKEND == name for name in backends):",
}


@dataclass(frozen=True)
class Result:
    test: str
    outcome: str  # passed, skipped, failed (an assertion), error (any other exception, or a crash) or timeout
    seconds: float = 0.0
    reason: str = ""
    output: str = ""  # of a test that did not pass: its traceback, and the end of what its ranks wrote


class Name(str):
    """A backend's name that equals those of the built-in backends whose gates it opens, too."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and (str.__eq__(self, other) or str(other) in GATES)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    expected = read_expected(given.expect)
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        make = load(given, folder)
        names = sorted(name for name in unittest.TestLoader().getTestCaseNames(make) if given.tests.search(name))
        if not names:
            parser.error("no test has such a name")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that sessions are ended first
        started, results = time.monotonic(), []
        for name in names:
            results.append(run_one(make(name), name, given.timeout, folder))
            print(row(results[-1], expected), flush=True)
    print(f"# {dict(Counter(result.outcome for result in results))} in {time.monotonic() - started:.0f} s")
    if given.json:
        given.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return int(any(is_broken(result) and result.test not in expected for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="dist_prims", help="the name given to init_process_group (dist_prims)")
    parser.add_argument(
        "--ranks", type=_whole, default=4, help="of each test (4); with 8 some 20 tests of small groups run as well"
    )
    parser.add_argument("--tests", type=re.compile, default=".", metavar="REGEX", help="only tests with such a name")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that one test may take (120)")
    parser.add_argument("--json", type=Path, help="write all results, with the output of those that failed")
    here = Path(__file__).parent / "expected.txt"
    parser.add_argument("--expect", type=Path, default=here, help="tests that cannot pass (expected.txt beside this)")
    return parser


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def read_expected(path: Path) -> dict[str, str]:
    """Lines of ``test_name: why it cannot pass``; those that begin with # are comments."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return {name.strip(): reason.strip() for name, _, reason in (line.partition(":") for line in lines)}


def load(given: argparse.Namespace, folder: str) -> type[unittest.TestCase]:
    """PyTorch's class of tests for this backend; called with the name of a test it makes that one."""
    tempfile.tempdir = folder  # torch itself leaves a folder there
    os.environ |= {"BACKEND": given.backend, "WORLD_SIZE": str(given.ranks), "TEMP_DIR": folder}
    os.environ |= {"INIT_METHOD": f"file://{folder}/init", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    # Less than ours, so that PyTorch has the time to tell where each rank hangs.
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(max(1, int(0.9 * given.timeout)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.argv = sys.argv[:1]  # PyTorch's tests read options of their own

    import torch
    from torch.testing._internal.common_distributed import DistTestCases

    for feature, known in DistTestCases.backend_feature.items():
        if known & GATES or feature == "plugin":  # a backend that comes from outside torch
            known.add(given.backend)
    for unable in DistTestCases.skip_collective.values():
        if unable >= GATES:
            unable.add(given.backend)
    tests = _changed_module(Name(given.backend))

    class Test(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def _check_return_codes(self, method: Any, elapsed: float) -> None:
            super()._check_return_codes(method, elapsed)
            codes = [process.exitcode for process in self.processes]  # PyTorch looks at those of rank 0 only
            if method not in self.skip_return_code_checks and len(set(codes)) > 1:
                raise RuntimeError(f"the ranks ended with different exit codes: {codes}")

    return Test


def _changed_module(name: Name) -> ModuleType:
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    for old, new in CHANGED.items():
        if source.count(old) != 1:
            raise SystemExit(f"this version of torch has other gates: {old!r} is not once in {spec.origin}")
        source = source.replace(old, new)
    module = importlib.util.module_from_spec(spec)
    module.__dict__["GIVEN_BACKEND"] = name
    sys.modules[MODULE] = module
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def run_one(test: unittest.TestCase, name: str, timeout: float, folder: str) -> Result:
    """Run a test in a session of its own: a kill reaches its ranks and whatever they have started."""
    own_folder, started = Path(tempfile.mkdtemp(dir=folder)), time.monotonic()
    if (pid := os.fork()) == 0:
        _in_session(test, name, own_folder)

    def has_ended() -> bool:
        # Left as a zombie: its number stays its own until the session is killed.
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    try:
        while not has_ended() and time.monotonic() - started <= timeout:
            time.sleep(0.02)
        late = not has_ended()
    finally:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:  # it had not come to its setsid
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    result = Result(name, "error", reason=f"the test's process ended with status {status}")
    if late:
        result = Result(name, "timeout", reason=f"killed after {timeout:g} s")
    else:
        with contextlib.suppress(FileNotFoundError):
            result = Result(**json.loads((own_folder / "result").read_text()))
    log = own_folder / "log"
    if is_broken(result) and log.exists():
        result = replace(result, output=result.output + log.read_text(errors="replace")[-8000:])
    shutil.rmtree(own_folder, ignore_errors=True)
    return replace(result, seconds=round(time.monotonic() - started, 2))


def _in_session(test: unittest.TestCase, name: str, folder: Path) -> None:
    """In the child: run the test, leave its result in the folder, and end."""
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        tempfile.tempdir = os.environ["TMPDIR"] = os.environ["TEMP_DIR"] = str(folder)
        result = judge(name, test, folder / "log")
        (folder / "result").write_text(json.dumps(asdict(result)))
    finally:
        os._exit(0)


def judge(name: str, test: unittest.TestCase, log: Path) -> Result:
    found = unittest.TestResult()
    unittest.TestSuite([test]).run(found)
    sys.stdout.flush()
    broken = [text for _, text in found.errors + found.failures]
    if not broken and found.skipped:
        return Result(name, "skipped", reason=found.skipped[0][1])
    if not broken and found.unexpectedSuccesses:
        return Result(name, "failed", reason="it passed, and was not to")
    if not broken:
        return Result(name, "passed")
    text = broken[0]
    reason = last_error(text)
    if "terminated or timed out" in text:
        return Result(name, "timeout", reason=reason, output=text)
    code = re.search(r"Expected exit code -?\d+ but got (-?\d+)", text)
    if code:  # a rank ended outside the body of the test; what it said is in the log alone
        reason = last_error(log.read_text(errors="replace"))
        return Result(name, "error", reason=f"rank 0: exit code {code[1]}; {reason}", output=text)
    return Result(name, "failed" if reason.startswith("AssertionError") else "error", reason=reason, output=text)


def last_error(text: str) -> str:
    """The last line that names an exception.

    >>> last_error("Traceback:\\n  raise\\nValueError: no rank 7\\n\\nas told by rank 0")
    'ValueError: no rank 7'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if ERROR.match(line)]
    return (errors or lines or ["no message"])[-1][:300]


def is_broken(result: Result) -> bool:
    return result.outcome not in PASSING


def row(result: Result, expected: dict[str, str]) -> str:
    remarks = [result.reason] if result.reason else []
    if is_broken(result) and result.test in expected:
        remarks.append(f"(expected: {expected[result.test]})")
    return f"{result.outcome:8} {result.seconds:7.2f} s  {result.test:64} {' '.join(remarks)}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
