"""Join the group under every launcher: which one it is, and that its ranks then work together."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launching import (
    LAUNCHER_VARIABLES,
    MPIRUN,
    SUM,
    TORCH,
    clean,
    forked,
    free_port,
    listening,
    needs_mpirun,
    run,
    together,
)

import dist_prims
from dist_prims.cli.doctor import main, report
from dist_prims.launch import Placement, detect
from dist_prims.rendezvous.detect_launcher import from_url
from dist_prims.rendezvous.network import interface_addresses, is_loopback

BACKEND = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


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
        ({**SLURM, "PMI_RANK": "1", "PMI_SIZE": "4"}, "srun"),  # srun --mpi=pmi2
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}, "python"),  # the batch script itself
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
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 indicates several ranks, but RANK, MASTER_ADDR, MASTER_PORT is not set"),
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


def test_a_rank_alone_prints_one_line_unless_quiet() -> None:
    done, quiet = forked((SUM, clean()), (SUM, clean(DIST_PRIMS_QUIET="1")))
    assert done.stdout == quiet.stdout == "rank 0 of 1: 1\n"
    assert done.stderr == f"dist_prims: 1 rank on 1 host by python, {BACKEND} over loopback\n"
    assert quiet.stderr == ""


OF_A_LAUNCHER = f"""
import atexit, os, sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "helpers")!r})
left = lambda: f"left {{not torch.distributed.is_initialized()}}\\n"
atexit.register(lambda: print(left(), end="", flush=True))  # in one piece, or ranks write between each other's
from launching import listening
before = set(listening(os.getpid()))
{SUM}
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
from dist_prims.cli.doctor import main
assert main() == 0
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
    start = [*TORCHRUN[:-1], "3"] if launcher == "torchrun" else [str(MPIRUN), "-n", "3", sys.executable]
    done = run([*start, str(tmp_path / "program.py")])
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank . of .: \d+", done.stdout)) == [f"rank {rank} of 3: 6" for rank in range(3)]
    assert re.findall(r"dist_prims: .* by \w+", done.stderr) == [f"dist_prims: 3 ranks on 1 host by {launcher}"]
    assert "destroy_process_group" not in done.stderr
    assert done.stdout.count("left True") == 3
    if launcher == "mpirun":
        assert done.stdout.count("3 of 3 ranks are on this host") == 3


@pytest.mark.parametrize("init_method", ["", "init_method='env://', "], ids=["found", "asked"])
def test_ranks_meet_by_environment_variables(init_method: str) -> None:
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    program = SUM.replace("init(", f"init({init_method}")
    outs = together(*((program, clean(RANK=rank, **variables)) for rank in "01"))
    assert outs == ["rank 0 of 2: 3\n", "rank 1 of 2: 3\n"]


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_ranks_meet_by_a_url_again_and_again(scheme: str, tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/meeting"
    programs = [SUM.replace("init(", f"init(init_method={url!r}, world_size=2, rank={rank}, ") for rank in "01"]
    for _ in range(2):  # the second time there is what the first has left: the file, or a port that has just closed
        outs = together(*((program, clean()) for program in programs))
        assert outs == ["rank 0 of 2: 3\n", "rank 1 of 2: 3\n"]


def test_by_a_file_that_the_dead_have_left(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meeting"
    programs = [SUM.replace("init(", f"init(init_method={url!r}, world_size=2, rank={rank}, ") for rank in "01"]
    dying = [program + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)" for program in programs]
    with pytest.raises(AssertionError, match="assert -9 == 0"):
        together(*((program, clean()) for program in dying))
    assert (tmp_path / "meeting").stat().st_size > 0
    programs[0] = "import time; time.sleep(0.5)\n" + programs[0]  # so that rank 1 finds nothing but what is left
    outs = together(*((program, clean()) for program in programs))
    assert outs == ["rank 0 of 2: 3\n", "rank 1 of 2: 3\n"]


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("dear diary")
    program = SUM.replace("init(", f"init(init_method='file://{tmp_path}/notes', world_size=2, rank=0, ")
    assert "exists and is not a rendezvous file" in forked((program, clean()))[0].stderr


def test_by_the_variables_of_srun() -> None:
    job = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "here"}
    job["SLURM_JOB_ID"] = str(free_port())
    outs = together(*((SUM, clean(SLURM_PROCID=rank, **job)) for rank in "01"))
    assert outs == ["rank 0 of 2: 3\n", "rank 1 of 2: 3\n"]


def test_ranks_of_spawn_listen_on_loopback_only() -> None:
    def body() -> set[str]:
        before = set(listening(os.getpid()))
        dist_prims.init(timeout=60)
        dist.barrier()
        return {socket.split(":")[0] for socket in set(listening(os.getpid())) - before}

    for found in dist_prims.spawn(body, 2, init=False, timeout=60):
        assert found, "each rank of gloo listens"
        assert found <= {"0100007F", "0000000000000000FFFF00000100007F"}


def test_a_second_init_is_harmless_and_another_world_size_is_an_error() -> None:
    def body() -> None:
        place = dist_prims.init()
        assert dist_prims.init(timeout=120) == place  # spawn's: to start, and to run
        assert dist_prims.init("gloo", world_size=2) == place
        with pytest.raises(ValueError, match="with world_size=2 and cannot join one with world_size=3"):
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
    program = SUM.replace("init(timeout=60", f"init(init_method={url!r}, world_size=3, rank=0, timeout=0.5")
    [done] = forked((program, clean()))
    assert done.returncode != 0
    assert "no sign of ranks [1, 2]" in done.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_a_rank_0_that_does_not_come_is_named(scheme: str, tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/meeting"
    program = SUM.replace("init(timeout=60", f"init(init_method={url!r}, world_size=3, rank=1, timeout=0.5")
    [done] = forked((program, clean()))
    assert done.returncode != 0
    assert "no sign of rank 0" in done.stderr


@pytest.mark.slow
@needs_mpirun
def test_an_mpi_that_is_not_the_launchers_is_named() -> None:
    """The variables say two ranks, but this process is alone in the MPI that mpi4py loads."""
    done = run([sys.executable, "-c", SUM], clean(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2"))
    assert done.returncode != 0
    assert "mpirun of Open MPI started 2 ranks" in done.stderr
    assert "which sees rank 0 of 1: another MPI than the launcher's" in done.stderr


@pytest.mark.slow  # test_scripts.py has a restart in the default tier, test_faults.py one after a rank was killed
def test_torchrun_restarts_the_ranks_after_a_crash(tmp_path: Path) -> None:
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


def test_hosts_are_distinguished_by_their_identifier() -> None:
    def named() -> Placement:
        os.environ["DIST_PRIMS_HOST_ID"] = "aabb"[int(os.environ["RANK"])]
        return dist_prims.init(timeout=60)

    places = dist_prims.spawn(named, 4, init=False, timeout=60)
    assert [place.hosts for place in places] == [((0, 1), (2, 3))] * 4
    assert [place.local_rank for place in places] == [0, 1, 0, 1]


def test_the_doctor_reports_what_is_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in filter(LAUNCHER_VARIABLES.search, list(os.environ)):
        monkeypatch.delenv(name)
    assert main() == 0
    text = capsys.readouterr().out
    names = ("dist_prims", "Python", "launcher", "rank", "host", "hosts", "gloo", "NCCL", "MPI", "UCX", "shared memory")
    for name in (*names, "cores", "memory", "/dev/shm", "open files", "locked memory", "interfaces"):
        assert re.search(rf"^{name} ", text, re.MULTILINE), name
    assert "no launcher" in text


@pytest.mark.parametrize(
    ("environ", "hosts"),
    [
        (SLURM, "n08, n09"),
        ({**TORCH, "LOCAL_WORLD_SIZE": "2"}, "2 of 4 ranks are on this host"),
        (TORCH, "known after the rendezvous of the ranks"),
    ],
)
def test_the_doctor_knows_the_hosts_that_the_launcher_tells(
    environ: dict[str, str], hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in filter(LAUNCHER_VARIABLES.search, list(os.environ)):
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert re.search(rf"^hosts +{hosts}$", report(), re.MULTILINE)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "one rank needs none; spawn provides a secret"),
        (TORCH, "none: the ranks are not authenticated; give all ranks the same DIST_PRIMS_SECRET"),
        ({**TORCH, "MASTER_ADDR": "localhost"}, "by a file of this user, since the ranks are on one host"),
        ({**TORCH, "DIST_PRIMS_SECRET": "0123456789abcdef"}, "by DIST_PRIMS_SECRET"),
        ({**TORCH, "DIST_PRIMS_SECRET": "0123"}, "fails: DIST_PRIMS_SECRET has 4 characters"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "3"}, "by a secret that rank 0 sends over PMI"),
    ],
)
def test_the_doctor_says_by_what_the_ranks_are_authenticated(
    environ: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in filter(LAUNCHER_VARIABLES.search, list(os.environ)):
        monkeypatch.delenv(name)
    for name, value in {**environ, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    assert re.search(rf"^authentication +{words}", report(), re.MULTILINE)


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
