"""Run a program on several hosts of this machine, for tests of what crosses them; see launch_scripts/netns-hosts.sh.

    done = on_hosts(2, 2, "import dist_prims; print(dist_prims.init().hosts)", rate="1gbit")
    assert done.returncode == 0, done.stderr

    with cluster(2, 1, [sys.executable, "program.py"]) as job:
        job.wait_for("training")
        job.cut(1)  # its packets vanish, and no rank gets an error from the kernel
        done = job.result()

Ranks share a pipe: print a line with one call of ``print(..., flush=True)``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess, Popen

import pytest
from launching import ROOT, clean

SCRIPT = str(ROOT / "launch_scripts/netns-hosts.sh")
_names = (f"test{os.getpid()}_{number}" for number in itertools.count())


def missing() -> str:
    """Why there can be no such cluster here, or nothing."""
    tools = ("ip", "tc", "unshare", "nsenter", "setpriv", "pgrep", "sysctl")
    if absent := [tool for tool in tools if not shutil.which(tool)]:
        return f"there is no {', '.join(absent)}; install iproute2, util-linux and procps"
    user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    tried = subprocess.run(["unshare", *user, "--net", "--pid", "--fork", "--mount-proc", "tc", "qdisc"], timeout=20,
        capture_output=True, text=True, check=False)  # fmt: skip
    return "" if tried.returncode == 0 else f"no network namespace may be made here: {tried.stderr.strip()}"


_reason = missing()
needs_hosts = pytest.mark.skipif(bool(_reason), reason=_reason)


class Job:
    """A command that runs on the hosts; ``stdout`` and ``stderr`` are files that it writes."""

    def __init__(self, name: str, process: Popen[str], folder: Path) -> None:
        self.name, self.process = name, process
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"

    def wait_for(self, words: str, times: int = 1, timeout: float = 60, stream: str = "stdout") -> None:
        """Return when the words have been printed so many times."""
        deadline, written = time.monotonic() + timeout, self.stdout if stream == "stdout" else self.stderr
        while written.read_text().count(words) < times:
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                state = "the job has ended" if ended else f"{timeout:g} s have passed"
                raise AssertionError(
                    f"no sign of {times} x {words!r}, and {state}\n{self.stdout.read_text()}\n{self.stderr.read_text()}"
                )
            time.sleep(0.02)

    def cut(self, host: int) -> None:
        """From now on its packets vanish; no rank gets a reset."""
        self._fault("--cut", str(host))

    def mend(self, host: int) -> None:
        self._fault("--mend", str(host))

    def slow(self, host: int, rate: str) -> None:
        self._fault("--slow", str(host), rate)

    def limit(self, host: int, size: int) -> None:
        """Larger packets vanish, in bytes."""
        self._fault("--limit", str(host), str(size))

    def _fault(self, what: str, *more: str) -> None:
        subprocess.run([SCRIPT, what, self.name, *more], check=True, timeout=20)

    def result(self) -> CompletedProcess[str]:
        """What it printed, once it has ended; the script has a deadline."""
        status = self.process.wait()
        return CompletedProcess(self.process.args, status, self.stdout.read_text(), self.stderr.read_text())


@contextlib.contextmanager
def cluster(
    hosts: int,
    ranks: int,
    command: Sequence[str],
    *,
    how: str = "torchrun",
    rate: str = "none",
    timeout: int = 60,
    env: Mapping[str, str] | None = None,
) -> Iterator[Job]:
    """Start the command; how: "torchrun", "mpirun", "each" (once on each host) or "login" (once, beside the hosts)."""
    name = next(_names)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if os.path.isabs(command[0]):
        path = f"{Path(command[0]).parent}:{path}"
    settings = {"PATH": path, "NAME": name, "TIMEOUT": str(timeout), "PYTHONUNBUFFERED": ""}
    with tempfile.TemporaryDirectory() as folder:
        default_signals = ["env", "--default-signal=INT"]  # a shell that starts tests in the background has it ignored
        start = [*default_signals, SCRIPT, str(hosts), str(ranks), rate, f"--{how}", "--", *command]
        with open(f"{folder}/stdout", "w") as out, open(f"{folder}/stderr", "w") as errors:
            process = Popen(start, env=clean(**{**settings, **(env or {})}), stdout=out, stderr=errors, text=True)
        try:
            yield Job(name, process, Path(folder))
        finally:
            process.kill()  # the hosts and all that runs there go with it
            process.wait()


def on_hosts(
    hosts: int,
    ranks: int,
    program: Path | str,
    rate: str = "none",
    timeout: int = 60,
    env: Mapping[str, str] | None = None,
    mpirun: bool = False,
    python: str = sys.executable,
) -> CompletedProcess[str]:
    """Run a Python program, given as a path or as its text, on so many ranks of each host, to its end.

    ``mpirun`` and ``torchrun`` are those beside ``python``, where there are any.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = program if isinstance(program, Path) else Path(folder, "program.py")
        if isinstance(program, str):
            path.write_text(program)
        how = "mpirun" if mpirun else "torchrun"
        with cluster(hosts, ranks, [python, str(path)], how=how, rate=rate, timeout=timeout, env=env) as job:
            return job.result()


SUM = """
import socket, torch, dist_prims
place = dist_prims.init(timeout=60)
total = torch.tensor(place.rank + 1)
torch.distributed.all_reduce(total)
line = f"rank {place.rank} on {socket.gethostname()}: {total.item()}, {place.hosts}\\n"
print(line, end="", flush=True)  # in one piece: torchrun has its ranks write without a buffer
"""
