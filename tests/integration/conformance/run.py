"""PyTorch's own tests of a ``torch.distributed`` backend, run against any backend: one line a test.

The tests ship in the torch wheel, in ``torch.testing._internal.distributed.distributed_test``. Run as they are, they
are skipped for a backend of another name than the built-in ones. Here ``--as`` opens the gates of the built-in backends
that it names. Each test has a session and a folder of its own: at its deadline the session is killed, and the folder is
removed, so that a test which hangs costs its own time and nothing else.

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
from collections import Counter, deque
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "torch.testing._internal.distributed.distributed_test"
PASSING = ("passed", "skipped")
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

    gates: frozenset[str] = frozenset()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and (str.__eq__(self, other) or str(other) in self.gates)

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
        names = [name for name in names if not (given.skip and given.skip.search(name))]
        if not names:
            parser.error("no test has such a name")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that sessions are ended first
        started, results = time.monotonic(), []
        with contextlib.closing(run_all(make, names, given.jobs, given.timeout, folder)) as ends:
            for result in ends:
                results.append(result)
                print(row(result, expected), flush=True)
    facts = describe(given, results, expected, time.monotonic() - started)
    print("# " + ", ".join(f"{key}: {value}" for key, value in facts.items()))
    if given.json:
        given.json.write_text(json.dumps({**facts, "results": [asdict(result) for result in results]}, indent=1))
    return int(any(is_broken(result) and result.test not in expected for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="dist_prims", help="the name given to init_process_group (dist_prims)")
    parser.add_argument(
        "--ranks", type=_whole, default=4, help="of each test (4); with 8 some 20 tests of small groups run as well"
    )
    parser.add_argument("--tests", type=re.compile, default=".", metavar="REGEX", help="only tests with such a name")
    parser.add_argument("--skip", type=re.compile, metavar="REGEX", help="no tests with such a name")
    parser.add_argument("--jobs", type=_whole, default=max(1, (os.cpu_count() or 1) // 2), help="tests at once")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that one test may take (120)")
    parser.add_argument("--as", dest="gates", default="gloo,mpi", help="built-in backends to stand for (gloo,mpi)")
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

    name = Name(given.backend)
    name.gates = frozenset(given.gates.split(",")) - {""}
    for feature, known in DistTestCases.backend_feature.items():
        if known & name.gates or feature == "plugin":  # a backend that comes from outside torch
            known.add(given.backend)
    for unable in DistTestCases.skip_collective.values():
        if name.gates and name.gates <= unable:
            unable.add(given.backend)
    tests = _changed_module(name)

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


def run_all(
    make: type[unittest.TestCase], names: list[str], jobs: int, timeout: float, folder: str
) -> Generator[Result, None, None]:
    """Run the tests, so many at once; the results come as the tests end."""
    waiting, live = deque(names), list[Run]()
    try:
        while waiting or live:
            while waiting and len(live) < jobs:
                name = waiting.popleft()
                live.append(Run(make(name), name, timeout, folder))
            time.sleep(0.02)
            for run in [run for run in live if run.is_over()]:
                result = run.end()
                live.remove(run)
                yield result
    finally:
        for run in live:
            run.end()


class Run:
    """One test under way, in a session of its own: a kill reaches its ranks and whatever they have started."""

    def __init__(self, test: unittest.TestCase, name: str, timeout: float, folder: str) -> None:
        self.name, self.timeout, self.started = name, timeout, time.monotonic()
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.pid = os.fork()
        if self.pid == 0:
            _in_session(test, name, self.folder)

    def is_over(self) -> bool:
        return self._has_ended() or time.monotonic() - self.started > self.timeout

    def _has_ended(self) -> bool:
        # Left as a zombie: its number stays its own until the session is killed.
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self) -> Result:
        late = not self._has_ended()
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it had not come to its setsid
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        result = Result(self.name, "error", reason=f"the test's process ended with status {status}")
        if late:
            result = Result(self.name, "timeout", reason=f"killed after {self.timeout:g} s")
        else:
            with contextlib.suppress(FileNotFoundError):
                result = Result(**json.loads((self.folder / "result").read_text()))
        log = self.folder / "log"
        if is_broken(result) and log.exists():
            result = replace(result, output=result.output + log.read_text(errors="replace")[-8000:])
        shutil.rmtree(self.folder, ignore_errors=True)
        return replace(result, seconds=round(time.monotonic() - self.started, 2))


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


def describe(
    given: argparse.Namespace, results: list[Result], expected: dict[str, str], seconds: float
) -> dict[str, Any]:
    import torch

    counts = Counter(result.outcome for result in results)
    broken = [result.test for result in results if is_broken(result)]
    facts = {"backend": given.backend, "as": given.gates, "ranks": given.ranks, "torch": torch.__version__}
    facts |= {"tests": len(results), **dict(sorted(counts.items())), "seconds": round(seconds, 1)}
    facts["expected to fail"] = sum(name in expected for name in broken)
    facts["passed though expected to fail"] = sum(
        result.outcome == "passed" and result.test in expected for result in results
    )
    return facts


if __name__ == "__main__":
    sys.exit(main())
