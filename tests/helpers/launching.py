"""Programs started as a user would start them, without what a launcher has left in the environment."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_prims

ROOT = Path(__file__).parents[2]

MPIRUN = Path(sys.executable).parent / "mpirun"

needs_mpirun = pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python; pip install mpich mpi4py")

SUM = """
import torch, dist_prims
place = dist_prims.init(timeout=60)
total = torch.tensor(place.rank + 1)
torch.distributed.all_reduce(total)
print(f"rank {place.rank} of {place.size}: {total.item()}", flush=True)
"""

PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

LAUNCHER_VARIABLES = re.compile(
    r"RANK$|^WORLD_SIZE$|^MASTER_|^LOCAL_|^PMI|^OMPI_|^SLURM_|^TORCHELASTIC_|^FLUX_|^PALS_|^MV2_|^MVP_|^PRTE_"
    r"|^DIST_PRIMS_(?!MPICC$)"  # with another mpicc than before a script would build the package again
)


def clean(**more: str) -> dict[str, str]:
    """The environment without what a launcher has left in it."""
    return {**{name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.search(name)}, **more}


def run(
    command: list[str], environ: Mapping[str, str] | None = None, timeout: float = 60, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run it to its end. A launcher that takes too long is asked to end its ranks, because a kill would leave them
    behind. What is left of its process group is killed."""
    environ = clean() if environ is None else environ
    with subprocess.Popen(command, env=environ, cwd=cwd, start_new_session=True, **PIPES) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def run_forked(program: Path, *arguments: str, ranks: int = 1, timeout: float = 110) -> None:
    """Run a program in forks of this process, in the folder of the program: one process without a launcher, or ranks.

    A fork has imported torch, for which a fresh interpreter takes one to two seconds of CPU time. The program finds the
    modules beside it and those that are installed, but not those of the tests. A failure is a ``RankFailedError``.
    """

    def main() -> None:
        if ranks == 1:
            for name in [name for name in os.environ if LAUNCHER_VARIABLES.search(name)]:
                del os.environ[name]
        own = (ROOT / "tests", ROOT / "examples")
        outside = [path for path in sys.path if not any(Path(path).is_relative_to(folder) for folder in own)]
        for name, module in [*sys.modules.items()]:
            if any(Path(getattr(module, "__file__", None) or "/").is_relative_to(folder) for folder in own):
                del sys.modules[name]
        sys.path[:] = [str(program.parent), *outside]
        sys.argv[:] = [str(program), *arguments]
        os.chdir(program.parent)
        runpy.run_path(str(program), run_name="__main__")

    dist_prims.spawn(main, ranks, init=False, timeout=timeout)


SCRIPTS = """
import ctypes, os, pathlib, sys, time
import torch, torch.distributed as dist, dist_prims, dist_prims.backend.create
folder, children = pathlib.Path(sys.argv[1]), {}
for number in range(int(sys.argv[2])):
    if (child := os.fork()) == 0:
        ctypes.CDLL(None).prctl(1, 9)  # it is killed at the end of the process that has forked it
        os.dup2(os.open(folder / f"said{number}", os.O_WRONLY | os.O_CREAT), 1)
        break
    children[child] = number
else:
    while children:
        child, status = os.wait()
        new = folder / "new"
        new.write_text(str(os.waitstatus_to_exitcode(status)))
        new.rename(folder / f"status{children.pop(child)}")
    os._exit(0)
def await_path(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)
def await_end(other):
    await_path(folder / f"status{other}")
"""


def run_scripts(
    program: str, count: int, folder: Path, environ: Mapping[str, str] | None = None, arguments: Sequence[str] = ()
) -> list[str]:
    """Run a script in several processes at once, which end as interpreters do: f"{status}: {output}" of each.

    The processes are forks of one interpreter, because each fresh one imports torch for two seconds. The program finds
    its ``number``, the ``folder``, and ``await_end(number)`` of another process.
    """
    done = run([sys.executable, "-c", SCRIPTS + program, str(folder), str(count), *arguments], environ)
    assert done.returncode == 0, done.stderr
    sys.stderr.write(done.stderr)
    return [
        f"{(folder / f'status{each}').read_text()}: {(folder / f'said{each}').read_text()}" for each in range(count)
    ]


def forked(*starts: tuple[str, Mapping[str, str]], seconds: float = 60) -> list[subprocess.CompletedProcess[str]]:
    """Run programs at once in forks of this process, each in an environment of its own, until all have ended.

    A fork has imported torch, for which a fresh interpreter takes one to two seconds of CPU time. Not for MPI, which
    would not be finalised: a fork ends without what C has registered for the end of an interpreter.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{folder}/{number}" for number in range(len(starts))]
        fork = multiprocessing.get_context("fork")
        ranks = [fork.Process(target=_main, args=(*start, name)) for start, name in zip(starts, names, strict=True)]
        deadline = time.monotonic() + seconds
        try:
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join(max(0.0, deadline - time.monotonic()))
            ends = [rank.exitcode for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        said = [(Path(f"{name}.stdout").read_text(), Path(f"{name}.stderr").read_text()) for name in names]
    assert None not in ends, f"not over after {seconds:g} s: {ends} {said}"
    return [subprocess.CompletedProcess("fork", end or 0, *each) for end, each in zip(ends, said, strict=True)]


def _main(program: str, environ: Mapping[str, str], name: str) -> None:
    for descriptor, stream in enumerate(("stdout", "stderr"), 1):
        file = os.open(f"{name}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        setattr(sys, stream, open(descriptor, "w", buffering=1, closefd=False))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(1)
    atexit._clear()  # what this process would do at its end
    status = 1
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    os._exit(status)


def together(*starts: tuple[str, Mapping[str, str]]) -> list[str]:
    """Run programs at once in forks; what each has printed."""
    ends = forked(*starts)
    for end in ends:
        assert end.returncode == 0, end.stderr
    return [end.stdout for end in ends]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


def listening(pid: int) -> list[str]:
    """The sockets on which a process listens, as address:port in hexadecimal."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor by which we look
            if (target := os.readlink(link)).startswith("socket:["):
                inodes.add(target[8:-1])
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [line[1] for line in lines if line[3] == "0A" and line[9] in inodes]
