"""Compare float32 all_reduce of dist_prims and other libraries on this host.

    python docs/benchmarks/libraries.py --build --ranks 2 --rounds 3

Each library has an environment of its own, which ``--build`` installs from the package index. Each contender runs once
a round in processes of its own, in an order that rotates; ``library_rank.py`` is the program of a rank. A library that
is not installed, fails or takes too long is named under the table, and the others are measured.

Each library gets the settings that are best on one host, and none is bound to cores. With more ranks than cores,
libraries that support it are set to yield the core while they wait.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dist_prims._chart import line_chart
from dist_prims.bench.arguments import positive, sizes
from dist_prims.bench.measure import iterations_for

CORES = len(os.sched_getaffinity(0))
MEMORY = Path("/dev/shm")
PROGRAM = Path(__file__).with_name("library_rank.py")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Library:
    """A contender.

    ``entry``: its function in library_rank.py. ``packages``: of its environment ``home``; without any, it runs in this
    one. ``starter``: the command that starts the ranks; without one, they are started directly. ``threaded``: settings
    with several threads a rank; a library without any reads ``OMP_NUM_THREADS``, or has one thread.
    """

    entry: str
    home: str = ""
    packages: tuple[str, ...] = ()
    starter: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    threaded: Mapping[str, str] = field(default_factory=dict)
    crowded: Mapping[str, str] = field(default_factory=dict)  # settings with more ranks, and their threads, than cores


_OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
_IMPI = {"I_MPI_ROOT": "{home}", "I_MPI_FABRICS": "shm", "I_MPI_PIN": "0", "LD_LIBRARY_PATH": "{home}/lib"}
_IMPI_YIELDS = {"I_MPI_THREAD_YIELD": "2"}
# The ring for large data, which Intel MPI does not choose by itself; small data changes, too.
_IMPI_RING = {"I_MPI_ADJUST_ALLREDUCE": f"8:{(1 << 20) + 1}-{(1 << 31) - 1}"}
# The calling thread does the work, because a worker for each rank would need a core of its own; except with more ranks
# than cores, because only threads that wait for a worker yield their core.
_CCL = {"CCL_ATL_TRANSPORT": "mpi", "CCL_ALLREDUCE": "direct", "CCL_WORKER_OFFLOAD": "0"}
_CCL_WORKERS = {"CCL_WORKER_COUNT": "{threads}", "CCL_WORKER_OFFLOAD": "1"}
_CCL_YIELDS = {"CCL_YIELD": "sched_yield", "CCL_SPIN_COUNT": "1", **_CCL_WORKERS}
_DEEPSPEED = {"TORCH_EXTENSIONS_DIR": "{home}/extensions", "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "{ranks}"}
_TORCH = f"torch=={torch.__version__.partition('+')[0]}"
_MPIRUN = ("mpirun", "-n")

LIBRARIES = {
    "dist_prims": Library("dist_prims"),
    "direct": Library("direct"),
    "zero_copy": Library("zero_copy"),
    "gloo": Library("gloo"),
    "openmpi": Library(
        "mpi", "openmpi", ("openmpi>=5,<6", "mpi4py", "numpy"), ("mpirun", "--bind-to", "none", "-n"), _OPENMPI
    ),
    "mpich": Library("mpi", "mpich", ("mpich", "mpi4py", "numpy"), _MPIRUN),
    "impi": Library("mpi", "impi", ("impi-rt", "mpi4py", "numpy"), _MPIRUN, _IMPI, {}, _IMPI_YIELDS),
    "impi_ring": Library(
        "mpi", "impi", ("impi-rt", "mpi4py", "numpy"), _MPIRUN, {**_IMPI, **_IMPI_RING}, {}, _IMPI_YIELDS
    ),
    "deepspeed": Library(
        "deepspeed", "deepspeed", (_TORCH, "deepspeed", "numpy", "ninja", "setuptools"), (), _DEEPSPEED
    ),
    "oneccl": Library(
        "oneccl",
        "oneccl",
        ("oneccl-devel", "impi-devel", "numpy"),
        _MPIRUN,
        {**_IMPI, **_CCL},
        _CCL_WORKERS,
        {**_IMPI_YIELDS, **_CCL_YIELDS},
    ),
}


class Failed(Exception):
    """A command failed; the message is the reason in one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if any element was wrong."""
    given = _parser().parse_args(arguments)
    missing: dict[str, str] = {}
    for name in given.only:
        home = given.cache.expanduser() / LIBRARIES[name].home
        try:
            _check_environment(LIBRARIES[name], home, given.build)
        except Failed as failed:
            missing[name] = str(failed)
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    wrong = 0
    for round in range(given.rounds):
        turn = round % len(given.only)
        for name in [*given.only[turn:], *given.only[:turn]]:
            if name in missing:
                continue
            print(f"round {round + 1} of {given.rounds}: {name}", file=sys.stderr, flush=True)
            lines, reason = run_once(name, given, round)
            if reason:
                missing[name] = f"ended in round {round + 1}: {reason}"
            for line in lines:
                seconds[name, line["nbytes"]] += line["seconds"]
                wrong += line["wrong"]
    print(table(seconds, given, missing, wrong), flush=True)
    if given.json:
        lines = [{"contender": name, "nbytes": nbytes, "seconds": each} for (name, nbytes), each in seconds.items()]
        given.json.write_text(json.dumps({"missing": missing, "wrong": wrong, "lines": lines}, indent=1))
    if given.plot:
        plot(given.plot, seconds, given)
    return int(wrong > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--threads", type=positive, default=1, help="of a rank, for libraries that use threads (1)")
    parser.add_argument("--sizes", type=sizes, default="8,4K,64K,1M,4M,16M,64M", help="8,64K,16M or 8:64M or 8:64M/8")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--only", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--build", action="store_true", help="create the missing environments")
    parser.add_argument("--cache", type=Path, default="~/.cache/dist_prims/peers", help="folder of the environments")
    parser.add_argument("--seconds", type=positive, default=120, help="time limit of one contender in one round (120)")
    parser.add_argument("--json", type=Path, help="write all times")
    parser.add_argument("--plot", type=Path, help="write a plot (SVG)")
    return parser


def _check_environment(library: Library, home: Path, is_wanted: bool) -> None:
    """Raise ``Failed`` if the environment of a library is missing and cannot be made."""
    complete, packages = home / "dist_prims_peers.txt", " ".join(library.packages)
    if not library.packages or (complete.is_file() and complete.read_text().splitlines()[:1] == [packages]):
        return
    if not is_wanted:
        raise Failed("no environment; --build creates it")
    if home.exists() and not (home / "pyvenv.cfg").is_file():
        raise Failed(f"{home} exists and is not a Python environment")
    print(f"building {home.name}", file=sys.stderr, flush=True)
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    environment = _environment(library, home, 1, 1)
    for command in (
        [sys.executable, "-m", "venv", str(home)],
        [str(home / "bin/python"), "-m", "pip", "install", "--quiet", *library.packages],
        [str(home / "bin/python"), str(PROGRAM), "prepare", library.entry, str(home)],
    ):
        run([command], 900, [environment])
    complete.write_text(packages + "\n")


def run_once(name: str, given: argparse.Namespace, round: int) -> tuple[list[dict[str, Any]], str]:
    """Run the ranks of a contender: a line for each completed size with the slowest rank's times, and why it ended."""
    library, home = LIBRARIES[name], given.cache.expanduser() / LIBRARIES[name].home
    with tempfile.TemporaryDirectory(prefix="dist_prims_peers_", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        place, reason = Path(folder), ""
        (place / "page").write_bytes(bytes(64 * (given.ranks + 1)))  # for the barrier
        shutil.copy(PROGRAM, place)  # without its neighbours, which would shadow modules
        iterations = {nbytes: max(3, -(-iterations_for(nbytes) // given.rounds)) for nbytes in given.sizes}
        orders = {"entry": library.entry, "home": str(home), "place": folder, "round": round}
        orders |= {"ranks": given.ranks, "threads": given.threads}
        orders |= {"iterations": iterations, "budget": given.seconds / 3 / len(given.sizes), "seconds": given.seconds}
        (place / "orders.json").write_text(json.dumps(orders))
        python = str(home / "bin/python") if library.packages else sys.executable
        program = [python, str(place / PROGRAM.name), "measure", str(place / "orders.json")]
        own = _environment(library, home, given.ranks, given.threads)
        try:
            if library.starter:
                starter = [str(home / "bin" / library.starter[0]), *library.starter[1:]]
                run([[*starter, str(given.ranks), *program]], given.seconds, [own])
            else:
                group = {"WORLD_SIZE": str(given.ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": place.name}
                own |= group  # DeepSpeed makes a file's name of the port
                ranks = [{**own, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(given.ranks)]
                run([program] * given.ranks, given.seconds, ranks)
        except Failed as failed:
            reason = str(failed)
        finally:
            for file in MEMORY.glob(f"*_{place.name}_*"):  # DeepSpeed does not remove its buffers, 66 MB for each rank
                file.unlink(missing_ok=True)
        return slowest([place / f"rank-{rank}.jsonl" for rank in range(given.ranks)]), reason


def _environment(library: Library, home: Path, ranks: int, threads: int) -> dict[str, str]:
    """The environment variables of a rank: this process's variables, with the commands of ``home`` first."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if library.packages:
        environment["PATH"] = f"{home / 'bin'}{os.pathsep}{environment.get('PATH', '')}"
        environment.pop("PYTHONPATH", None)
    else:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    settings, running = dict(library.settings), ranks
    if threads > 1 and library.threaded:
        settings |= library.threaded
        running *= threads
    if running > CORES:
        settings |= library.crowded
    values = {"home": home, "ranks": ranks, "threads": threads}
    return environment | {name: value.format(**values) for name, value in settings.items()}


def run(commands: Sequence[Sequence[str]], seconds: float, environments: Sequence[Mapping[str, str]]) -> None:
    """Run all commands at once. If one fails, or after ``seconds``, end all and raise ``Failed``."""
    until, started = time.monotonic() + seconds, []
    with tempfile.TemporaryFile() as output:
        try:
            for command, environment in zip(commands, environments, strict=True):
                streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
                started.append(subprocess.Popen(command, env=environment, start_new_session=True, **streams))
            while any(process.poll() is None for process in started) and not any(each.returncode for each in started):
                if time.monotonic() > until:
                    raise Failed(f"not done in {seconds:g} s; {_reason(output)}")
                time.sleep(0.02)
        except OSError as error:
            raise Failed(str(error)) from None
        finally:
            for process in started:
                _end(process)
        if any(process.returncode for process in started):
            raise Failed(_reason(output))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process: SIGTERM, on which an MPI launcher ends its ranks, then SIGKILL for the whole session."""
    for kind, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        try:
            process.wait(0.5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, kind)
        else:
            return
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


def _reason(output: Any) -> str:
    """The last line that mentions an error, else the last line."""
    output.seek(0)
    lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() and not line.startswith(("File", "raise"))]
    return str(([*lines[-1:], *errors] or ["no output"])[-1])[:200]


def slowest(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The lines that all ranks have completed; a rank may have been killed while it wrote one."""
    texts = [file.read_text().rpartition("\n")[0] if file.exists() else "" for file in files]
    lines = []
    for ranks in zip(*([json.loads(line) for line in text.splitlines()] for text in texts), strict=False):
        times = [max(iteration) for iteration in zip(*(rank["seconds"] for rank in ranks), strict=True)]
        lines.append({"nbytes": ranks[0]["nbytes"], "seconds": times, "wrong": sum(rank["wrong"] for rank in ranks)})
    return lines


def table(
    seconds: Mapping[tuple[str, int], Sequence[float]],
    given: argparse.Namespace,
    missing: Mapping[str, str],
    wrong: int,
) -> str:
    """A line for each size, a column for each contender, then what is missing; the format of a page in Markdown."""
    names = [name for name in given.only if any(name == measured for measured, _ in seconds)]
    rows = [["bytes", *names], ["---"] * (len(names) + 1)]
    for nbytes in given.sizes:
        medians = [statistics.median(seconds[name, nbytes]) if (name, nbytes) in seconds else None for name in names]
        rows.append([str(nbytes), *("" if median is None else f"{median * 1e6:.1f}" for median in medians)])
    of = f"{given.ranks} ranks of {given.threads} threads on {CORES} cores"
    lines = [f"all_reduce, {of}, microseconds, median of {given.rounds} rounds", ""]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", f"wrong elements: {wrong}", *(f"{name}: {why}" for name, why in missing.items())])


def plot(path: Path, seconds: Mapping[tuple[str, int], Sequence[float]], given: argparse.Namespace) -> None:
    series = {
        name: [
            (nbytes, statistics.median(seconds[name, nbytes]) * 1e6)
            for nbytes in given.sizes
            if (name, nbytes) in seconds
        ]
        for name in given.only
    }
    title = f"all_reduce of float32, {given.ranks} ranks of one host"
    line_chart(path, title, "bytes", "microseconds, median", series, log_x=True, log_y=True)


if __name__ == "__main__":
    sys.exit(main())
