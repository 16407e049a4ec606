"""Join the group under every launcher: which one it is, and that its ranks then work together."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch.distributed as dist

import dist_prims
from dist_prims.launch import Placement, detect
from dist_prims.launch.detect import from_url
from dist_prims.launch.doctor import report

ROOT = Path(__file__).parent.parent
MPIRUN = Path(sys.executable).parent / "mpirun"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
needs_mpirun = pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python; pip install mpich mpi4py")

SUM = """
import torch, dist_prims
place = dist_prims.init(timeout=60)
total = torch.tensor(place.rank + 1)
torch.distributed.all_reduce(total)
print(f"rank {place.rank} of {place.size}: {total.item()}", flush=True)
"""
LAUNCHER_VARIABLES = re.compile(r"RANK$|^WORLD_SIZE$|^MASTER_|^LOCAL_|^PMI|^OMPI_|^SLURM_|^TORCHELASTIC_|^DIST_PRIMS_")


def clean(**more: str) -> dict[str, str]:
    """The environment without what a launcher has left in it."""
    return {**{name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.search(name)}, **more}


def run(command: list[str], environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environ = clean() if environ is None else environ
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environ, cwd=ROOT)


def together(*starts: tuple[list[str], Mapping[str, str]]) -> list[str]:
    """Start several processes at once; what each has printed."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=environ, **pipes) for command, environ in starts]
    try:
        ends = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, ends, strict=True):
        assert process.returncode == 0, errors
    return [out for out, _ in ends]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
SLURM["SLURM_STEP_NODELIST"] = "n[08-09]"


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "python"),
        (TORCH, "environment variables"),
        ({**TORCH, "TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, "mpirun of Open MPI"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, "mpirun of MPICH"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4", "I_MPI_X": ""}, "mpirun of Intel MPI"),
        (SLURM, "srun"),
        ({**SLURM, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, "mpirun of Open MPI"),
        ({**TORCH, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "environment variables"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "python"),  # a process manager, but no MPI
        ({**SLURM, "SLURM_STEP_ID": "4294967291"}, "python"),  # the batch script itself
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "64", "SLURM_JOB_ID": "7"}, "python"),
    ],
)
def test_the_launcher_is_known_by_what_only_it_sets(environ: dict[str, str], name: str) -> None:
    found = detect(environ)
    assert found.name == name
    assert (found.rank, found.size) == ((0, 1) if name == "python" else (1, 4))


def test_srun_tells_where_to_meet() -> None:
    assert re.fullmatch(r"tcp://n08:\d+", detect(SLURM).url or "")
    assert detect({**SLURM, "SLURM_STEP_ID": "1"}).url != detect(SLURM).url
    assert (detect({**SLURM, "SLURM_STEP_NODELIST": "n08"}).url or "").startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 announces other ranks, but RANK, MASTER_ADDR, MASTER_PORT is not set"),
        ({**TORCH, "RANK": "4"}, "rank 4 of 4"),
    ],
)
def test_an_environment_that_contradicts_itself(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        detect(environ)


def test_bad_urls() -> None:
    with pytest.raises(ValueError, match="give 'env://', 'tcp://host:port' or 'file:///absolute/path'"):
        from_url("file://relative", 0, 1, {})
    with pytest.raises(ValueError, match="needs rank= and world_size="):
        from_url("tcp://localhost:1", environ={})
    with pytest.raises(ValueError, match="needs RANK, WORLD_SIZE"):
        from_url("env://", environ={})


def test_alone() -> None:
    done = run([sys.executable, "-c", SUM])
    assert done.stdout == "rank 0 of 1: 1\n"
    assert done.stderr == "dist_prims: 1 rank on 1 host by python, gloo over loopback\n"
    assert run([sys.executable, "-c", SUM], clean(DIST_PRIMS_QUIET="1")).stderr == ""


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("mpirun", marks=needs_mpirun)])
def test_under_a_launcher(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SUM)
    start = TORCHRUN if launcher == "torchrun" else [str(MPIRUN), "-n", "2", sys.executable]
    done = run([*start, str(tmp_path / "program.py")])
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank . of 2: 3", done.stdout)) == ["rank 0 of 2: 3", "rank 1 of 2: 3"]
    assert done.stderr.count("dist_prims: 2 ranks on 1 host") == 1
    assert "destroy_process_group" not in done.stderr


def test_by_variables_url_and_file(tmp_path: Path) -> None:
    by_variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", SUM]
    together(*((command, clean(RANK=rank, **by_variables)) for rank in "01"))
    file = tmp_path / "meeting"
    for url in (f"tcp://127.0.0.1:{free_port()}", f"file://{file}", f"file://{file}"):  # the file is there already
        programs = [SUM.replace("init(", f"init(init_method={url!r}, world_size=2, rank={rank}, ") for rank in "01"]
        outs = together(*(([sys.executable, "-c", program], clean()) for program in programs))
        assert outs == ["rank 0 of 2: 3\n", "rank 1 of 2: 3\n"]


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("dear diary")
    program = SUM.replace("init(", f"init(init_method='file://{tmp_path}/notes', world_size=2, rank=0, ")
    assert "exists and is no file of a rendezvous" in run([sys.executable, "-c", program]).stderr


def test_by_the_variables_of_srun() -> None:
    job = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "here"}
    job["SLURM_JOB_ID"] = str(free_port())
    outs = together(*(([sys.executable, "-c", SUM], clean(SLURM_PROCID=rank, **job)) for rank in "01"))
    assert outs == ["rank 0 of 2: 3\n", "rank 1 of 2: 3\n"]


def listening(pid: int) -> list[str]:
    """The addresses at which a process listens."""
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
    return [line[1].split(":")[0] for line in lines if line[3] == "0A" and line[9] in inodes]


@needs_mpirun
@pytest.mark.parametrize("launcher", ["spawn", "mpirun"])
def test_ranks_of_one_host_listen_on_loopback_only(launcher: str) -> None:
    program = f"""
import os, sys, torch, dist_prims
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_launch import listening
if {launcher == "mpirun"}:
    from mpi4py import MPI  # it listens by itself
def body():
    before = set(listening(os.getpid()))
    dist_prims.init(timeout=60)
    torch.distributed.barrier()
    found = set(listening(os.getpid())) - before
    assert found <= {{"0100007F", "0000000000000000FFFF00000100007F"}}, found
    return found
if {launcher == "spawn"}:
    assert set().union(*dist_prims.spawn(body, 2, init=False, timeout=60))
else:
    body()
"""
    start = [str(MPIRUN), "-n", "2"] if launcher == "mpirun" else []
    done = run([*start, sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr


def test_twice_is_harmless_and_otherwise_is_told() -> None:
    def body() -> None:
        place = dist_prims.init()
        assert dist_prims.init(timeout=60) == place
        assert dist_prims.init("gloo", world_size=2) == place
        with pytest.raises(ValueError, match="has joined with world_size=2 and is now asked for world_size=3"):
            dist_prims.init(world_size=3)
        dist.barrier()
        dist.destroy_process_group()
        assert dist_prims.init(timeout=60) == place  # and once more from the start

    dist_prims.spawn(body, 2, timeout=60)


def test_a_group_that_someone_else_made() -> None:
    def body() -> Placement:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return dist_prims.init()

    assert dist_prims.spawn(body, 1, init=False, timeout=60) == [Placement(0, ((0,),))]


def test_a_rank_that_does_not_come_is_named() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    program = SUM.replace("init(timeout=60", f"init(init_method={url!r}, world_size=3, rank=0, timeout=2")
    done = run([sys.executable, "-c", program])
    assert done.returncode != 0
    assert "no sign of ranks [1, 2]" in done.stderr


def test_torchrun_starts_anew_after_a_crash(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        SUM + "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    os._exit(place.rank)\n"
    )
    done = run([*TORCHRUN, "--max-restarts", "1", str(tmp_path / "program.py")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rank 1 of 2: 3") == 2, "both attempts met"


@needs_mpirun
def test_an_exception_ends_the_whole_job_under_mpirun() -> None:
    program = SUM + "if place.rank == 1: raise LookupError('this one')\nimport time; time.sleep(1000)\n"
    done = run([str(MPIRUN), "-n", "2", sys.executable, "-c", program])
    assert done.returncode != 0
    assert "LookupError: this one" in done.stderr


def test_hosts_are_told_apart_by_more_than_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> Placement:
        os.environ["DIST_PRIMS_HOST_ID"] = "ab"[dist.get_rank() // 2] if dist.is_initialized() else "?"
        return dist_prims.init(timeout=60)

    def named() -> Placement:
        os.environ["DIST_PRIMS_HOST_ID"] = "aabb"[int(os.environ["RANK"])]
        return dist_prims.init(timeout=60)

    places = dist_prims.spawn(named, 4, init=False, timeout=60)
    assert [place.hosts for place in places] == [((0, 1), (2, 3))] * 4
    assert [place.local_rank for place in places] == [0, 1, 0, 1]


def test_the_doctor_tells_what_is_here() -> None:
    text = report()
    for name in ("dist_prims", "Python", "launcher", "rank", "host", "gloo", "NCCL", "MPI", "cores", "memory"):
        assert re.search(rf"^{name} ", text, re.MULTILINE), name
    done = run([sys.executable, "-m", "dist_prims", "doctor"])
    assert done.returncode == 0
    assert "no launcher" in done.stdout
