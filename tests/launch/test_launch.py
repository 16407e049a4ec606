"""Join the group under every launcher: which one it is, and that its ranks then work together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launching import MPIRUN, ROOT, SUM, clean, forked, free_port, needs_mpirun, run, together

import dist_prims
from dist_prims.launch import Placement
from dist_prims.rendezvous import url_rendezvous
from dist_prims.rendezvous.network import interface_addresses, is_loopback

BACKEND = "cpu:dist_prims,cuda:nccl" if torch.cuda.is_available() else "dist_prims"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_a_rank_alone_prints_one_line_unless_quiet() -> None:
    done, quiet = forked((SUM, clean()), (SUM, clean(DIST_PRIMS_QUIET="1")))
    assert done.stdout == quiet.stdout == "rank 0 of 1: 1\n"
    assert done.stderr == f"dist_prims: 1 rank on 1 host by python, {BACKEND} over loopback\n"
    assert quiet.stderr == ""


@pytest.mark.parametrize("stderr", ["full", "closed", "without a reader"])
def test_a_start_line_that_cannot_be_written_is_dropped(stderr: str) -> None:
    """``init`` raised OSError after the group was made, so a full disk under the log ended rank 0, and so the job."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe, open("/dev/full", "wb") as full:
        program = f"import sys; sys.stderr.close()\n{SUM}" if stderr == "closed" else SUM
        stream = pipe if stderr == "without a reader" else full
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=clean(),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stdout) == (0, "rank 0 of 1: 1\n")


OF_A_LAUNCHER = f"""
import atexit, os, sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "helpers")!r})
left = lambda: f"left {{not torch.distributed.is_initialized()}}\\n"
atexit.register(lambda: print(left(), end="", flush=True))  # in one piece, or ranks write between each other's
from launching import listening
before = set(listening(os.getpid()))
{SUM.replace("init(", "init('gloo', ")}
found = {{socket.split(":")[0] for socket in set(listening(os.getpid())) - before}}
assert found, "each rank of gloo listens"
assert found <= {{"0100007F", "0000000000000000FFFF00000100007F"}}, found
kept = torch.distributed.group.WORLD
for _ in range(30):
    torch.distributed.all_reduce(torch.ones(1000))
"""
UNDER_TORCHRUN = "import sys\nsys.setswitchinterval(1e3)\n"
UNDER_MPIRUN = """
import torch.distributed, mpi4py
from dist_prims.cli.doctor import report
print(report())
from mpi4py import MPI
assert not MPI.Is_initialized() and not torch.distributed.is_initialized()
assert mpi4py.rc.finalize is True
MPI.Init_thread()  # it listens by itself
"""


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("mpirun", marks=needs_mpirun)])
def test_under_a_launcher(launcher: str, tmp_path: Path) -> None:
    """The ranks meet, listen on the loopback interface only, and leave the group at their end.

    Something keeps the group alive. gloo's threads free tensors a little late: in half of such runs Python had gone by
    then, and they aborted.

    Under mpirun the doctor comes first: it starts nothing, and leaves MPI usable. Open MPI fails a job whose ranks end
    without MPI_Finalize; MPICH does not mind, so the setting is asked.
    """
    (tmp_path / "program.py").write_text((UNDER_MPIRUN if launcher == "mpirun" else UNDER_TORCHRUN) + OF_A_LAUNCHER)
    start = TORCHRUN if launcher == "torchrun" else [str(MPIRUN), "-n", "2", sys.executable]
    done = run([*start, str(tmp_path / "program.py")])
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank . of .: \d+", done.stdout)) == [f"rank {rank} of 2: 3" for rank in range(2)]
    assert re.findall(r"dist_prims: .* by \w+", done.stderr) == [f"dist_prims: 2 ranks on 1 host by {launcher}"]
    assert "destroy_process_group" not in done.stderr
    assert done.stdout.count("left True") == 2
    if launcher == "mpirun":
        assert done.stdout.count("2 of 2 ranks are on this host") == 2


def meet(*programs: str, environs: Sequence[dict[str, str]] = ({}, {})) -> None:
    """Run the programs of two ranks in forks, each with some variables; they meet."""
    outs = together(*((program, clean(**environ)) for program, environ in zip(programs, environs, strict=True)))
    assert outs == ["rank 0 of 2: 3\n", "rank 1 of 2: 3\n"]


def meeting_at(url: str, ranks: Sequence[int] = (0, 1), size: int = 2, timeout: float = 60) -> list[str]:
    """The programs of ranks that meet at a URL."""
    place = f"init_method={url!r}, world_size={size}, timeout={timeout}"
    return [SUM.replace("timeout=60", f"{place}, rank={rank}") for rank in ranks]


@pytest.mark.parametrize("by", ["variables", "env://", "srun"])
def test_ranks_meet_by_environment_variables(by: str) -> None:
    port = str(free_port())
    same, rank_name = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, "RANK"
    if by == "srun":
        same = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "here", "SLURM_JOB_ID": port}
        rank_name = "SLURM_PROCID"
    program = SUM.replace("init(", "init(init_method='env://', ") if by == "env://" else SUM
    meet(program, program, environs=[{**same, rank_name: rank} for rank in "01"])


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_ranks_meet_by_a_url_again_and_again(scheme: str, tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/meeting"
    for _ in range(2):  # the second time there is what the first has left: the file, or a port that has just closed
        meet(*meeting_at(url))


def test_ranks_meet_by_a_file_that_dead_ranks_have_left(tmp_path: Path) -> None:
    programs = meeting_at(f"file://{tmp_path}/meeting")
    killed = forked(*((program + "import os; os.kill(os.getpid(), 9)", clean()) for program in programs))
    assert [rank.returncode for rank in killed] == [-9, -9]
    assert (tmp_path / "meeting").stat().st_size > 0
    meet("import time; time.sleep(0.5)\n" + programs[0], programs[1])  # so that rank 1 finds only what is left


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("dear diary")
    [program] = meeting_at(f"file://{tmp_path}/notes", [0])
    assert "exists and is not a rendezvous file" in forked((program, clean()))[0].stderr


def test_a_file_that_an_earlier_group_removes_at_this_moment_is_no_error(tmp_path: Path) -> None:
    """The rank looked whether there is a file, and then failed to open it."""
    file, stop = tmp_path / "meeting", threading.Event()

    def make_and_remove() -> None:
        while not stop.is_set():
            file.touch()
            file.unlink()

    with ThreadPoolExecutor(1) as threads:
        earlier_groups = threads.submit(make_and_remove)
        try:
            for _ in range(5000):
                url_rendezvous._check_file(str(file))
        finally:
            stop.set()
        earlier_groups.result()


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    urls = [f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}", f"file://{tmp_path}/meeting"]
    programs = [*meeting_at(urls[0], [0], 3, timeout=0.5)]
    programs += [program for url in urls[1:] for program in meeting_at(url, [1], 3, timeout=0.5)]
    ends = forked(*((program, clean()) for program in programs))
    assert all(end.returncode != 0 for end in ends)
    for end, absent in zip(ends, ["ranks [1, 2]", "rank 0", "rank 0"], strict=True):
        assert f"no sign of {absent}" in end.stderr


def test_a_second_init_is_harmless_and_another_world_size_is_an_error() -> None:
    def body() -> None:
        place = dist_prims.init()
        assert dist_prims.init(timeout=120) == place  # spawn's: to start, and to run
        assert dist_prims.init(BACKEND, world_size=2) == place
        with pytest.raises(ValueError, match="with world_size=2 and cannot join one with world_size=3"):
            dist_prims.init(world_size=3)
        dist.barrier()
        dist.destroy_process_group()
        assert dist_prims.init(timeout=60) == place  # and once more from the start

    dist_prims.spawn(body, 2, timeout=60)


@pytest.mark.parametrize("how", ["init", "spawn"])
def test_gloo_is_used_where_the_library_cannot_be_had(
    how: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One rank of the host says why."""

    def no_adapter() -> None:
        raise ImportError("no compiler\nand more lines")

    def joined() -> str:
        if how == "init":
            dist_prims.init(timeout=60)
        return str(dist.get_backend())

    monkeypatch.setattr("dist_prims.backend.torch_adapter.load", no_adapter)
    backend = BACKEND.replace("dist_prims", "gloo")
    assert dist_prims.spawn(joined, 2, init=how == "spawn", timeout=60) == [backend] * 2
    reason = "dist_prims: the backend is gloo, because dist_prims is not available: no compiler\n"
    assert capfd.readouterr().err.count(reason) == 1


def test_unlike_backends_are_an_error_on_every_rank() -> None:
    """They waited for each other until their timeout."""

    def joined() -> str:
        with pytest.raises(RuntimeError, match="rank 0 has the backend 'gloo', and rank 2 has 'dist_prims'") as caught:
            dist_prims.init("dist_prims" if os.environ["RANK"] == "2" else "gloo", timeout=60)
        return str(caught.value).partition(": rank 0 has")[0]

    assert dist_prims.spawn(joined, 3, init=False, timeout=60) == [f"init: rank {rank}" for rank in range(3)]


def test_a_group_that_someone_else_made() -> None:
    def body() -> Placement:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return dist_prims.init()

    assert dist_prims.spawn(body, 1, init=False, timeout=60) == [Placement(0, ((0,),))]


@pytest.mark.slow
@needs_mpirun
def test_an_mpi_that_is_not_the_launchers_is_named() -> None:
    """The variables say two ranks, but this process is alone in the MPI that mpi4py loads."""
    done = run([sys.executable, "-c", SUM], clean(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2"))
    assert done.returncode != 0
    assert "mpirun of Open MPI started 2 ranks" in done.stderr
    assert "which sees rank 0 of 1: another MPI than the launcher's" in done.stderr


@needs_mpirun
@pytest.mark.parametrize("before", ["", pytest.param("sys.stdout.close(); ", marks=pytest.mark.slow)])
def test_an_exception_ends_the_whole_job_under_mpirun(before: str) -> None:
    """A rank that had closed its stdout did not abort the job, because the flush of the stream raised."""
    failure = f"if place.rank == 1: {before}raise LookupError('this one')"
    program = f"{SUM}import sys, time\n{failure}\ntime.sleep(1000)\n"
    done = run([str(MPIRUN), "-n", "2", sys.executable, "-c", program])
    assert done.returncode != 0
    assert "LookupError: this one" in done.stderr


def test_hosts_are_distinguished_by_their_identifier() -> None:
    def named() -> Placement:
        os.environ["DIST_PRIMS_HOST_ID"] = "aabb"[int(os.environ["RANK"])]
        return dist_prims.init(timeout=60)

    places = dist_prims.spawn(named, 4, init=False, timeout=60)
    assert [place.hosts for place in places] == [((0, 1), (2, 3))] * 4
    assert [place.local_rank for place in places] == [0, 1, 0, 1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("secret", ["", "0123456789abcdef"])
@pytest.mark.parametrize("by", ["init", "init_process_group"])
def test_the_start_says_that_the_ranks_are_not_authenticated(by: str, secret: str, tmp_path: Path) -> None:
    address = next((each for each in interface_addresses() if not is_loopback(each)), None)
    if address is None:
        pytest.skip("this host has a loopback address only")
    plain = (
        "import torch, torch.distributed as dist\ndist.init_process_group('dist_prims')\ndist.all_reduce(torch.ones(1))"
    )
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "HOME": str(tmp_path)}
    variables |= {"DIST_PRIMS_SECRET": secret} if secret else {}
    program = f"import sys; sys.stderr = sys.stdout\n{SUM if by == 'init' else plain}"
    outs = together(*((program, clean(RANK=rank, **variables)) for rank in "01"))
    assert [out.count("ranks are not authenticated") for out in outs] == [0 if secret else 1, 0]


@pytest.mark.slow
@needs_mpirun
def test_a_secret_of_some_ranks_under_mpirun(tmp_path: Path) -> None:
    """Of rank 0 alone it is refused; of another rank alone it is not used."""
    program = tmp_path / "program.py"
    program.write_text(f"""
import os, dist_prims
rank = os.environ["PMI_RANK"]
if rank == "0":
    os.environ["DIST_PRIMS_SECRET"] = "a" * 32
try:
    dist_prims.init(timeout=60)
except RuntimeError as error:
    print(f"rank {{rank}}: {{error}}\\n", end="", flush=True)
os.environ.pop("DIST_PRIMS_SECRET", None)
if rank == "1":
    os.environ["DIST_PRIMS_SECRET"] = "a" * 32
{SUM}
""")
    done = run([str(MPIRUN), "-n", "2", sys.executable, str(program)])
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2 has no secret, and rank 0 has one" in done.stdout
    assert "rank 1 of 2: 3" in done.stdout
